"""One run as a picture of what overlapped."""
