"""Logits by node of the target's tree, left where the backend has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.contract.rows import LogitRows


class NodeRows:
    """Finds the row of a node; of a device's rows only those are brought that are asked for."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[LogitRows, int]] = {}

    def update(self, nodes: Sequence[int], logits: LogitRows) -> None:
        """logits [len(nodes), vocab]."""
        assert len(nodes) == len(logits), f"{len(nodes)} nodes have {len(logits)} rows"
        self._places.update((node, (logits, i)) for i, node in enumerate(nodes))

    def __getitem__(self, node: int) -> NDArray[np.float32]:
        """float32 [vocab]"""
        logits, i = self._places[node]
        return logits[i]

    def clear(self) -> None:
        """Let go of all rows, and of the device's memory that they take."""
        self._places = {}
