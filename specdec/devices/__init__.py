"""Device profiles: named, from a file, or measured."""
