"""Token streams, the batches drawn from them, and text to and from tokens."""
