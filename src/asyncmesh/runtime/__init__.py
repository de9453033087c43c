"""The real mesh: worker processes that drive the protocol and the engine over a network."""
