"""Tiers: how much of a KV pool is in memory, and where the rest is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.attention.batch import BLOCK_SIZE
from backends.kv.pool import blocks_of

_NUM_ENDS = 4
"""Blocks beside those of the nodes, for the ends of sequences."""


@dataclass(frozen=True)
class Tiers:
    """Sizes of a pool with a file.

    n_hot: blocks that memory holds.
    n_kept_free: hot blocks that a pass may need for its nodes and the ends of its sequences; so
        many are free before it, if sequences have other full ones.
    folder: of the file.
    """

    n_hot: int
    n_kept_free: int
    folder: Path

    @classmethod
    def of(cls, hot_tokens: int, max_nodes: int, folder: Path) -> Tiers:
        """Return the sizes for `hot_tokens` in memory and passes of up to `max_nodes` nodes."""
        return cls(hot_tokens // BLOCK_SIZE, blocks_of(max_nodes) + _NUM_ENDS, folder)

    @classmethod
    def min_hot_tokens(cls, max_nodes: int) -> int:
        """Return the minimum of `hot_tokens`."""
        return (blocks_of(max_nodes) + 2 * _NUM_ENDS) * BLOCK_SIZE

    def n_cold(self, n_blocks: int) -> int:
        """Return the maximum number of cold blocks among `n_blocks`."""
        return max(1, n_blocks - self.n_hot + self.n_kept_free)
