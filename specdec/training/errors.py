"""TrainError: a draft cannot be trained as asked."""

from __future__ import annotations

from offload.errors import SpecdecError


class TrainError(SpecdecError):
    """A draft cannot be trained: text, draft, options, memory or the result."""
