"""The real mesh: worker processes that drive the protocol and the engine over a network."""

import os

# torchft reads it when it is loaded, and else prints several lines for every round.
os.environ.setdefault("RUST_LOG", "error")
