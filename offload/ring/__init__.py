"""The ring that reads streamed layers into memory, in order, over and over."""
