"""Sequences that share a pool of KV blocks, and the expected content of each of their rows."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType

import torch

from backends.attention.batch import BLOCK_SIZE, rows_in_pool
from backends.contract.backend import PREFIX, BackendError
from backends.kv import pool as kv_pool
from backends.kv import sequence as kv_sequence

N_BLOCKS = 8


@dataclass
class ExpectedSequence:
    """A sequence's expected rows: one number for each, written nowhere else."""

    kv: kv_sequence.BlockStore
    committed: list[int] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        return self.committed + [self.live[node] for node in self.kv.table.ids]


class KvSimulation:
    """Random operations on sequences; after each of them every sequence is checked.

    pool, sequence: the modules of the pool and its sequences, or ones with a mistake.
    """

    def __init__(
        self, seed: int, pool: ModuleType = kv_pool, sequence: ModuleType = kv_sequence
    ) -> None:
        self.rng, self.sequence = random.Random(seed), sequence
        self.pool = pool.KvPool(1, N_BLOCKS)
        self.sequences: list[ExpectedSequence] = []
        self.n_written = self.n_full = 0

    def run(self, n_operations: int) -> None:
        """Run operations. Raise AssertionError if a row is not the one that was written."""
        operations = [self.append, self.grow, self.grow, self.commit, self.commit]
        operations += [self.prune, self.rollback, self.fork, self.abort]
        for _ in range(n_operations):
            if not self.sequences or (len(self.sequences) < 4 and self.rng.random() < 0.1):
                self.sequences.append(ExpectedSequence(self.sequence.BlockStore(self.pool)))
            elif len(self.sequences) > 2 and self.rng.random() < 0.08:
                self.sequences.pop(self.rng.randrange(len(self.sequences))).kv.close()
            self.rng.choice(operations)(self.rng.choice(self.sequences))
            self.check()
        for sequence in self.sequences:
            sequence.kv.close()
        assert self.pool.is_unused
        assert self.pool.n_free == N_BLOCKS
        self.pool.free()

    # --- operations -------------------------------------------------------------------------------

    def append(self, sequence: ExpectedSequence) -> None:
        self.abort(sequence)
        num_tokens = self.rng.choice([1, 3, 20, 63, 64, 65, 100])
        numbers = self.write(sequence, len(sequence.committed), num_tokens)
        if numbers:
            sequence.kv.append([0] * num_tokens)
            sequence.committed += numbers

    def grow(self, sequence: ExpectedSequence) -> None:
        parents = []
        nodes = [PREFIX, *sequence.kv.table.ids]
        for node in range(
            sequence.kv.table.next_id, sequence.kv.table.next_id + self.rng.randint(1, 12)
        ):
            parents.append(self.rng.choice(nodes))
            nodes.append(node)
        first = sequence.kv.table.num_tokens
        ids = sequence.kv.add(parents, [0] * len(parents))
        numbers = self.write(sequence, first, len(ids))
        sequence.live.update(zip(ids, numbers, strict=False))
        if not numbers:
            self.abort(sequence)

    def commit(self, sequence: ExpectedSequence) -> None:
        table = sequence.kv.table
        path: list[int] = []
        while below := self.children(sequence, path[-1] if path else PREFIX):
            if self.rng.random() < 0.3:
                break
            path.append(self.rng.choice(below))
        keep = [node for node in below if self.rng.random() < 0.5]
        sequence.kv.commit(path, keep)
        sequence.committed += [sequence.live[node] for node in path]
        sequence.live = {node: sequence.live[node] for node in table.ids}

    def prune(self, sequence: ExpectedSequence) -> None:
        sequence.kv.prune([node for node in sequence.kv.table.ids if self.rng.random() < 0.2])
        sequence.live = {node: sequence.live[node] for node in sequence.kv.table.ids}

    def rollback(self, sequence: ExpectedSequence) -> None:
        length = self.rng.randint(0, len(sequence.committed))
        sequence.kv.rollback(length)
        sequence.committed, sequence.live = sequence.committed[:length], {}

    def abort(self, sequence: ExpectedSequence) -> None:
        n_intact = self.rng.choice([None, len(sequence.committed), len(sequence.committed) // 2])
        sequence.kv.abort(n_intact)
        sequence.committed, sequence.live = sequence.committed[:n_intact], {}

    def fork(self, sequence: ExpectedSequence) -> None:
        if len(self.sequences) < 6:
            length = self.rng.randint(0, len(sequence.committed))
            self.sequences.append(
                ExpectedSequence(sequence.kv.fork(length), sequence.committed[:length])
            )

    # --- writing and checking ---------------------------------------------------------------------

    def children(self, sequence: ExpectedSequence, node: int) -> list[int]:
        return [item for item in sequence.kv.table.ids if sequence.kv.table.parents[item] == node]

    def write(self, sequence: ExpectedSequence, first: int, num_tokens: int) -> list[int]:
        """Write new numbers to these rows; none if the pool is full, as it reported beforehand."""
        n_blocks, n_free = (
            sequence.kv.n_blocks_for(first + num_tokens - sequence.kv.table.num_tokens),
            None,
        )
        if first == sequence.kv.table.num_tokens:
            n_free = self.pool.n_free
        try:
            places = sequence.kv.append_positions(first, num_tokens)
        except BackendError:
            self.n_full += 1
            assert n_free is None or n_blocks > n_free
            return []
        assert n_free is None or self.pool.n_free == n_free - n_blocks
        numbers = [self.n_written + i for i in range(num_tokens)]
        self.n_written += num_tokens
        keys = torch.tensor(numbers, dtype=torch.float32).view(1, 1, num_tokens, 1)
        self.pool.begin(places)
        for part in keys.split(
            self.rng.randint(1, num_tokens), dim=2
        ):  # in chunks, as a long prompt
            self.pool.layers[0].update(part, -part)
        self.pool.check_written(num_tokens)
        return numbers

    def check(self) -> None:
        users = Counter(
            block for sequence in self.sequences for block in sequence.kv.blocks.tolist()
        )
        assert self.pool.n_free == N_BLOCKS - len(users)
        assert self.pool.n_shared == users.total() - len(users)
        for sequence in self.sequences:
            num_tokens = len(sequence.rows)
            sequence.kv.check_integrity()
            assert len(sequence.kv.blocks) == -(-num_tokens // BLOCK_SIZE)
            if num_tokens:
                at = torch.from_numpy(
                    rows_in_pool(sequence.kv.blocks, torch.arange(num_tokens).numpy())
                )
                layer = self.pool.layers[0]
                assert layer.keys[0, 0, at, 0].tolist() == sequence.rows
                assert layer.values[0, 0, at, 0].tolist() == [-number for number in sequence.rows]
