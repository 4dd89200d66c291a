"""`inferq model inspect`: what a file is, whether its rows can be batched, how fast it runs here, what to configure.

Judges with the same code that the worker loads models with; serves nothing and needs no broker.
"""
