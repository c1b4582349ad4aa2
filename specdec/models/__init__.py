"""A model's name, its files and its format."""
