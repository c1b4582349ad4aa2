"""Walks of compiled loops through a tree, divided between threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch

_SMALL = 200_000
"""Multiplications (50 us) below which a second thread costs as much as it saves."""


def divided(run: Callable[[int, int], None], n_parts: int, n_multiplications: int) -> None:
    """Call `run(first, last)` for ranges of the parts, each in a thread of its own."""
    n_threads = 1 if n_multiplications < _SMALL else torch.get_num_threads()
    ends = [n_parts * i // n_threads for i in range(n_threads + 1)]
    submitted = [_threads().submit(run, *pair) for pair in zip(ends[1:], ends[2:], strict=False)]
    run(ends[0], ends[1])
    for other in submitted:
        other.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="specdec-recurrent")


def chain(n_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of the parents and of the tokens of a chain; see `depth_first`."""
    above, slots = np.zeros(n_tokens, np.int64), np.zeros(n_tokens, np.int64)
    above[0] = -1
    return above, slots


def depth_first(parents: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray, int]:
    """Return (nodes depth first, slot of each one's parent, its own slot, number of slots).

    A last child takes its parent's slot, so a chain has one. The child that needs most slots comes
    last, so a tree has `max_slots` at most (registers of an expression: Sethi and Ullman 1970). -1
    is the state that the tree grows from.
    """
    children = _by_needed_slots(parents)
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


def max_slots(num_nodes: int) -> int:
    """Return the maximum number of slots of a tree: two branches that need n take n + 1."""
    return num_nodes.bit_length()


def _by_needed_slots(parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node, those that need fewer slots first."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    needed = [1] * len(parents)
    for node in (*reversed(range(len(parents))), -1):  # children come after their parents
        below = children.get(node, [])
        below.sort(key=needed.__getitem__)
        if below and node >= 0:
            before_last = needed[below[-2]] if len(below) > 1 else 0
            needed[node] = max(needed[below[-1]], 1 + before_last)
    return children
