"""Sans-I/O state machines: what a worker does next, given what happened."""
