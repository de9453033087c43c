"""The real mesh: worker processes that drive the protocol and the engine over a network."""

import os

# torchft logs a line for every heartbeat's consequence unless this is set before it is loaded.
os.environ.setdefault("RUST_LOG", "error")
