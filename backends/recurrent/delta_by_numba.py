"""Delta rules in compiled loops: a head's state stays in the cache while all nodes pass.

Sums are in the order of the state's rows, one term after the other, so a token has the same bits
alone, in a prompt and in a tree. Threads divide the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.recurrent.kinds import Recurrence, Rows, State
from backends.recurrent.walks import chain, depth_first, divided
from backends.tiles.compiling import compiled_lazily

_EPSILON = 1e-6
"""Term below the norm of queries and keys (transformers' l2norm)."""


@dataclass(frozen=True)
class CompiledDeltaRule(Recurrence):
    """See DeltaRule."""

    n_products = 3

    normalises: bool

    def initial(self, rows: Rows) -> State:
        _, key, value, *_ = rows
        shape = (value.shape[1], key.shape[2], value.shape[2])
        return torch.zeros(shape, dtype=torch.float32, device=key.device)

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        if state.is_meta:
            return state, torch.empty_like(rows[2])
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
        """Return (stack [slots, heads, key dim, value dim], outputs [tokens, heads, value dim])."""
        query, key, value, decay, beta = (x.float().contiguous().numpy() for x in rows)
        n_tokens, n_heads, value_dim = value.shape
        key_dim = key.shape[2]
        scale = np.float32(1 / math.sqrt(key_dim))
        epsilon = np.float32(_EPSILON if self.normalises else -1.0)
        query, key = _scaled(query, epsilon, scale), _scaled(key, epsilon, np.float32(1))
        decay = _exp(decay.reshape(n_tokens, n_heads, -1))
        stack = np.empty((n_slots, n_heads, key_dim, value_dim), np.float32)
        output = np.empty((n_tokens, n_heads, value_dim), np.float32)
        source = state.numpy()

        def run(first: int, last: int) -> None:
            _deltas(
                first, last, source, above, slots, query, key, value, decay, beta, stack, output
            )

        divided(run, n_heads, n_tokens * n_heads * key_dim * value_dim)
        return stack, torch.from_numpy(output).to(rows[2].dtype)


@compiled_lazily
def _scaled(x: Any, epsilon: Any, scale: Any) -> Any:
    """Divide rows by their norms unless epsilon is negative, and multiply them by `scale`."""
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            factor = scale
            if epsilon >= 0:
                total = np.float32(0)
                for k in range(x.shape[2]):
                    total += x[i, j, k] * x[i, j, k]
                factor = scale / np.sqrt(total + epsilon)
            for k in range(x.shape[2]):
                out[i, j, k] = x[i, j, k] * factor
    return out


@compiled_lazily
def _exp(x: Any) -> Any:
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            for k in range(x.shape[2]):
                out[i, j, k] = np.float32(math.exp(x[i, j, k]))
    return out


@compiled_lazily
def _deltas(  # noqa: C901  # in one function: calls would keep its loops from being vectorised
    first: Any,
    last: Any,
    state: Any,
    above: Any,
    slots: Any,
    query: Any,
    key: Any,
    value: Any,
    decay: Any,
    beta: Any,
    stack: Any,
    out: Any,
) -> None:
    """Compute the heads first..last of all nodes, which come depth first."""
    group = value.shape[1] // key.shape[1]
    key_dim, n_columns = key.shape[2], value.shape[2]
    by_channel = decay.shape[2] > 1
    for h in range(first, last):
        for n in range(len(slots)):
            here = stack[slots[n], h]
            k, q, v, o = key[n, h // group], query[n, h // group], value[n, h], out[n, h]
            g = decay[n, h, 0]
            memory = np.zeros(n_columns, np.float32)
            in_place = above[n] == slots[n]
            # Told apart, since loops over rows that may be the same are not vectorised.
            up_all = state[h] if above[n] < 0 else stack[above[n], h]
            for i in range(key_dim):
                k_i, row = k[i], here[i]
                if by_channel:
                    g = decay[n, h, i]
                if in_place:
                    for j in range(n_columns):
                        row[j] *= g
                else:
                    up = up_all[i]
                    for j in range(n_columns):
                        row[j] = up[j] * g
                for j in range(n_columns):
                    memory[j] += row[j] * k_i
            b = beta[n, h]
            for j in range(n_columns):
                memory[j] = (v[j] - memory[j]) * b
                o[j] = 0.0
            for i in range(key_dim):
                k_i, q_i, row = k[i], q[i], here[i]
                for j in range(n_columns):
                    row[j] += k_i * memory[j]
                for j in range(n_columns):
                    o[j] += row[j] * q_i
