"""GGUF architectures with recurrent layers: those that run, and why others do not."""

from __future__ import annotations

from backends.contract.backend import UnsupportedModel
from backends.gguf.model import GgufModel

REFUSED: dict[str, str] = {}
TRIED: frozenset[str] = frozenset()


def refuse_untried(model: GgufModel) -> None:
    """Raise UnsupportedModel for a recurrent architecture that was not found to be right."""
