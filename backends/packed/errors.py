"""What packing raises; it imports no library, so that refusals do not wait for one."""

from __future__ import annotations

from offload.errors import SpecdecError


class PackError(SpecdecError):
    """A model cannot be packed."""
