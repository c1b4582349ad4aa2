"""Description of a model's files: bytes in all and by type."""

from __future__ import annotations

from collections import Counter
from typing import Any

from bench.peers.registry import GGUF, Weights
from offload.formats.checkpoint import WeightIndex
from offload.formats.gguf_index import GgufIndex


def describe_weights(weights: Weights) -> dict[str, Any]:
    """Return format, model, draft, n_bytes, and types: share of the bytes, the largest first."""
    index = (
        GgufIndex.from_path(weights.model)
        if weights.format == GGUF
        else WeightIndex.from_directory(weights.model)
    )
    n_bytes: Counter[str] = Counter()
    for record in index.values():
        n_bytes[record.scheme or record.dtype] += record.n_bytes
    total = sum(n_bytes.values())
    return {
        "format": weights.format,
        "model": str(weights.model),
        "draft": None if weights.draft is None else str(weights.draft),
        "n_bytes": total,
        "types": {name: n / total for name, n in n_bytes.most_common()},
    }
