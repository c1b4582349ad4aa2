"""Mistakes in the KV that sequences share: random histories of several sequences catch every one."""

from __future__ import annotations

from types import ModuleType

import pytest
from kv_simulation import KvSimulation
from mutants import mutated

from backends.contract.backend import BackendError
from backends.kv import pool, sequence

IN_SEQUENCE = {
    "a shared block is written": ("if self._pool.is_shared(self._blocks[at]):", "if False:"),
    "what a fork shares is not counted": (
        "            self._pool.share(block)",
        "            pass",
    ),
    "a fork shares a block too few": (
        "self._blocks[: blocks_of(length)]",
        "self._blocks[: length // 64]",
    ),
    "only the first block is copied": (
        "for at in range(first // BLOCK_ROWS, len(self._blocks)):",
        "for at in range(first // BLOCK_ROWS, first // BLOCK_ROWS):",
    ),
    "the first block is not copied": (
        "for at in range(first // BLOCK_ROWS, len(self._blocks)):",
        "for at in range(-(-first // BLOCK_ROWS), len(self._blocks)):",
    ),
    "rows move to the prefix's end": ("first = prefix + int(moved[0])", "first = prefix"),
    "rows move from where they are": (
        "old_rows = prefix + np.array(order, dtype=np.int64)[moved[0] :]",
        "old_rows = prefix + np.arange(len(order))[moved[0] :]",
    ),
    "rows do not move": ("if len(moved):", "if False:"),
    "a broken prefix stays": ("self.table.cut(n_intact)", "pass"),
    "copies take no room": ("return n_copied + max(", "return max("),
    "blocks without a row stay": ("while len(self._blocks) > n_blocks:", "while False:"),
    "the block of the last row goes": (
        "while len(self._blocks) > n_blocks:",
        "while len(self._blocks) > max(n_blocks - 1, 0):",
    ),
    "blocks of a text that ended stay": (
        "self.table.rollback(0)  # the ids of nodes are never used twice",
        "return",
    ),
}
IN_POOL = {
    "a copied block is held as before": (
        "layer.copy_block(block, other)\n        self.give_back(block)",
        "layer.copy_block(block, other)",
    ),
    "a block is copied without its values": (
        "for pool in (self.keys, self.values):\n            if pool is not None:\n"
        "                blocks",
        "for pool in (self.keys,):\n            if pool is not None:\n                blocks",
    ),
    "rows are moved without their values": (
        "for pool in (self.keys, self.values):\n            if pool is not None:\n"
        "                pool[:, :, targets]",
        "for pool in (self.keys,):\n            if pool is not None:\n"
        "                pool[:, :, targets]",
    ),
    "a block of two is free": ("if not self._n_users[block]:", "if self._n_users[block] < 2:"),
    "a block that is given back is lost": ("heapq.heappush(self._given_back, block)", "pass"),
    "a block that is taken stays free": (
        "heapq.heappop(self._given_back)",
        "self._given_back[0]",
    ),
    "a block is shared with one user": (
        "return self._n_users[block] > 1",
        "return self._n_users[block] > 2",
    ),
    "free ones are those never in use": (
        "self.n_blocks - self.n_touched + len(self._given_back)",
        "self.n_blocks - self.n_touched",
    ),
    "a chunk is written where the first one was": ("at = row + a - first", "at = row"),
}
N_HISTORIES, N_OPERATIONS = 12, 80


def is_right(in_pool: ModuleType = pool, in_sequence: ModuleType = sequence) -> bool:
    try:
        for seed in range(N_HISTORIES):
            KvSimulation(seed, in_pool, in_sequence).run(N_OPERATIONS)
    except (AssertionError, BackendError, IndexError, RuntimeError):
        return False
    return True


def test_without_a_mistake_it_is_right() -> None:
    simulations = [KvSimulation(seed) for seed in range(N_HISTORIES)]
    for simulation in simulations:
        simulation.run(N_OPERATIONS)
    assert sum(simulation.n_full for simulation in simulations) > 0  # and nothing is lost then


@pytest.mark.parametrize("name", IN_SEQUENCE)
def test_a_mistake_in_a_text_is_caught(name: str) -> None:
    assert not is_right(in_sequence=mutated(sequence, *IN_SEQUENCE[name]))


@pytest.mark.parametrize("name", IN_POOL)
def test_a_mistake_in_the_pool_is_caught(name: str) -> None:
    assert not is_right(in_pool=mutated(pool, *IN_POOL[name]))
