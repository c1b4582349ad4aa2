"""The same ring on a device, filled from pinned host memory."""
