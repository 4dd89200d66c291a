"""The client library of inferq, and its command line."""
