"""The virtual mesh: the same protocol and engine as the real one, in virtual time."""
