"""Model families, how they are split into stages, and generation of text with them."""
