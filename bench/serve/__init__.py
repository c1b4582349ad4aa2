"""The server under its clients: many at once, and many that go away."""
