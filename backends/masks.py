"""Attention masks and key positions for a prefix followed by a tree of nodes.

Additive masks [1, 1, queries, keys]: 0 where a query may look, the dtype's most negative value
elsewhere (the convention of transformers, which eager attention and SDPA share). Windows are
by position, since the rows of a tree are not in the order of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PassLayout:
    """Who sits where in one forward: rows already cached, and the new ones.

    prefix : committed rows, at positions 0 .. prefix-1
    node_positions [nodes] : positions of the rows after the prefix, new ones included
    visible [new, nodes] : which of those rows each new row may look at
    """

    prefix: int
    node_positions: np.ndarray
    visible: np.ndarray

    @property
    def n_new(self) -> int:
        return len(self.visible)

    @property
    def first_new(self) -> int:
        """Index of the first new row among the nodes."""
        return len(self.node_positions) - self.n_new

    @property
    def new_positions(self) -> np.ndarray:
        return self.node_positions[self.first_new :]

    def key_positions(self, end: int) -> np.ndarray:
        """Positions of the keys that exist once `end` new rows are cached, [keys]."""
        nodes = self.node_positions[: self.first_new + end]
        return np.concatenate([np.arange(self.prefix, dtype=np.int64), nodes])

    def allowed(self, start: int, end: int, window: int | None) -> np.ndarray:
        """Bool [end - start, keys]: what the new rows start..end may look at."""
        nodes = self.visible[start:end, : self.first_new + end]
        allowed = np.concatenate([np.ones((end - start, self.prefix), dtype=bool), nodes], axis=1)
        if window is not None:
            distance = self.new_positions[start:end, None] - self.key_positions(end)[None, :]
            allowed &= distance < window
        return allowed


class CausalLayout(PassLayout):
    """A run of `n_new` rows after the prefix, each of which sees all before it.

    The prompt's layout: the quadratic mask is made only for the rows asked for.
    """

    def __init__(self, prefix: int, n_new: int) -> None:
        positions = prefix + np.arange(n_new, dtype=np.int64)
        super().__init__(prefix, positions, np.empty((n_new, 0), dtype=bool))

    def allowed(self, start: int, end: int, window: int | None) -> np.ndarray:
        first = self.prefix + start
        allowed = np.ones((end - start, self.prefix + end), dtype=bool)
        allowed[:, first:] = np.tri(end - start, dtype=bool)  # all before them is in view
        if window is not None:
            allowed &= ~np.tri(*allowed.shape, k=first - window, dtype=bool)
        return allowed


def additive_mask(
    layout: PassLayout,
    start: int,
    end: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Mask [1, 1, end - start, keys] of the new rows start..end in `dtype`."""
    allowed = torch.from_numpy(layout.allowed(start, end, window)).to(device)
    mask = torch.full(allowed.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(allowed, 0.0)[None, None]


def alibi_bias(
    slopes: torch.Tensor, layout: PassLayout, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """ALiBi bias [heads, 1, keys]: slope x position of the key (Press et al. 2022).

    Softmax does not change when a row is shifted, so the key's position alone serves, and
    each node of a tree gets its own depth's.
    """
    positions = torch.from_numpy(layout.key_positions(end)).to(slopes.device)
    return (slopes[:, None, None] * positions).to(dtype)
