"""Errors of packing; imports no library, so that refusals need not wait for one."""

from __future__ import annotations

from offload.errors import SpecdecError


class PackError(SpecdecError):
    """Raised when a model cannot be packed."""
