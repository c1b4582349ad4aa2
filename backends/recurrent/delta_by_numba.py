"""Delta rules in compiled loops: a head's state stays in the cache while all nodes pass.

Sums are in the order of the state's rows, one term after the other, so a token has the same bits
alone, in a prompt and in a tree. Threads divide the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from backends.packed.by_numba import compiled_lazily
from backends.recurrent.kinds import Recurrence, Rows, State

_EPSILON = 1e-6
"""Term below the norm of queries and keys (transformers' l2norm)."""
_SMALL = 200_000
"""Multiplications (50 us) below which a second thread costs as much as it saves."""


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
        n_tokens = len(rows[0])
        above, slots = np.zeros(n_tokens, np.int64), np.zeros(n_tokens, np.int64)
        above[0] = -1
        stack, output = self._walk(state, rows, above, slots, 1)
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
        n_threads = torch.get_num_threads()
        if n_tokens * n_heads * key_dim * value_dim < _SMALL:
            n_threads = 1
        ends = [n_heads * i // n_threads for i in range(n_threads + 1)]

        def run(first: int, last: int) -> None:
            _deltas(
                first, last, source, above, slots, query, key, value, decay, beta, stack, output
            )

        submitted = [
            _threads().submit(run, *pair) for pair in zip(ends[1:], ends[2:], strict=False)
        ]
        run(ends[0], ends[1])
        for other in submitted:
            other.result()
        return stack, torch.from_numpy(output).to(rows[2].dtype)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="specdec-delta")


def depth_first(parents: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray, int]:
    """Return (nodes depth first, slot of each one's parent, its own slot, number of slots).

    A last child takes its parent's slot, so a chain has one and a tree as many as branches are
    open at a time. -1 is the state that the tree grows from.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order: list[int] = []
    left = list(reversed(children.get(-1, ())))
    while left:
        order.append(left.pop())
        left += reversed(children.get(order[-1], ()))
    own: dict[int, int] = {}
    free: list[int] = []
    above, n_slots = [], 0
    for node in order:
        parent = parents[node]
        above.append(-1 if parent < 0 else own[parent])
        if parent >= 0 and children[parent][-1] == node:
            own[node] = own[parent]
        elif free:
            own[node] = free.pop()
        else:
            own[node], n_slots = n_slots, n_slots + 1
        if node not in children:
            free.append(own[node])
    slots = [own[node] for node in order]
    return order, np.array(above, np.int64), np.array(slots, np.int64), n_slots


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
