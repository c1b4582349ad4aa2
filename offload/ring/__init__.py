"""The ring that brings streamed layers into memory, in order, over and over."""
