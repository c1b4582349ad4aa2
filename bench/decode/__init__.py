"""How fast decoding is, with and without a draft."""
