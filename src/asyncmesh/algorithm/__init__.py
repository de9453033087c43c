"""Pure maths on tensors and integers. No clocks, no sockets, no global randomness."""
