"""`inferq whatif`: the worker's own scheduler in simulated time, before a change reaches a device."""
