"""Mamba-2 in compiled loops: a head's state stays in the cache while all nodes pass.

Sums are in the order of the state's rows, one term after the other, so a token has the same bits
alone, in a prompt and in a tree. Threads divide the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.recurrent.kinds import Rows, State
from backends.recurrent.mamba import Mamba2
from backends.recurrent.walks import chain, depth_first, divided
from backends.tiles.compiling import compiled_lazily


@dataclass(frozen=True)
class CompiledMamba2(Mamba2):
    """See Mamba2; its states are [heads, state, head dim], so that sums are over rows."""

    def initial(self, rows: Rows) -> State:
        x, _, b, _ = rows
        shape = (x.shape[1], b.shape[2], x.shape[2])
        return torch.zeros(shape, dtype=torch.float32, device=x.device)

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        if state.is_meta:
            return state, torch.empty_like(rows[0])
        stack, output = self._walk(state, rows, *chain(len(rows[0])), 1)
        return torch.from_numpy(stack[0]), output

    def branch(
        self, state: State, rows: Rows, parents: Sequence[int], requested: Sequence[int]
    ) -> list[torch.Tensor]:
        order, above, slots, n_slots = depth_first(parents)
        _, output = self._walk(state, tuple(x[order] for x in rows), above, slots, n_slots)
        place = {node: i for i, node in enumerate(order)}
        return [output[place[node] : place[node] + 1] for node in requested]

    def _walk(
        self, state: State, rows: Rows, above: np.ndarray, slots: np.ndarray, n_slots: int
    ) -> tuple[np.ndarray, torch.Tensor]:
        """Return (stack [slots, heads, state, head dim], outputs [tokens, heads, head dim])."""
        steps = self.steps(rows[1].float())
        x, b, c = (rows[i].float().contiguous().numpy() for i in (0, 2, 3))
        dt, decay = (part.contiguous().numpy() for part in steps)
        n_tokens, n_heads, head_dim = x.shape
        stack = np.empty((n_slots, n_heads, b.shape[2], head_dim), np.float32)
        output = np.empty((n_tokens, n_heads, head_dim), np.float32)
        source = state.numpy()

        def run(first: int, last: int) -> None:
            _scan(first, last, source, above, slots, x, dt, decay, b, c, stack, output)

        divided(run, n_heads, n_tokens * n_heads * b.shape[2] * head_dim)
        return stack, self.with_skip(torch.from_numpy(output), rows[0])


@compiled_lazily
def _scan(
    first: Any,
    last: Any,
    state: Any,
    above: Any,
    slots: Any,
    x: Any,
    dt: Any,
    decay: Any,
    b: Any,
    c: Any,
    stack: Any,
    out: Any,
) -> None:
    """Compute the heads first..last of all nodes, which come depth first."""
    group = x.shape[1] // b.shape[1]
    state_dim, n_columns = b.shape[2], x.shape[2]
    for h in range(first, last):
        for n in range(len(slots)):
            here = stack[slots[n], h]
            added, read, v, o = b[n, h // group], c[n, h // group], x[n, h], out[n, h]
            g, step = decay[n, h], dt[n, h]
            in_place = above[n] == slots[n]
            # Told apart, since loops over rows that may be the same are not vectorised.
            up_all = state[h] if above[n] < 0 else stack[above[n], h]
            for j in range(n_columns):
                o[j] = 0.0
            for i in range(state_dim):
                row, factor, c_i = here[i], step * added[i], read[i]
                if in_place:
                    for j in range(n_columns):
                        row[j] = row[j] * g + factor * v[j]
                else:
                    up = up_all[i]
                    for j in range(n_columns):
                        row[j] = up[j] * g + factor * v[j]
                for j in range(n_columns):
                    o[j] += row[j] * c_i
