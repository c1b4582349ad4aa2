"""Generations of the loaded models: their texts and beams, and what is kept between them."""
