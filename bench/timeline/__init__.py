"""Timeline of one run as a picture."""
