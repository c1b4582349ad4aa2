"""Generations of the loaded models: their sequences and beams, and what is kept between them."""
