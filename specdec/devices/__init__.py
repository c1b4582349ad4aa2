"""What a device can do: named, from a file, or measured."""
