"""Texts that share a pool of KV blocks, and what each of their rows has to hold."""

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
    """A text's rows: one number for each, written nowhere else."""

    kv: kv_sequence.BlockStore
    committed: list[int] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        return self.committed + [self.live[node] for node in self.kv.table.ids]


class KvSimulation:
    """Random operations on sequences; after each of them every text is looked at.

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
        """Raises AssertionError where a row is not the one that was written."""
        operations = [self.append, self.grow, self.grow, self.commit, self.commit]
        operations += [self.prune, self.rollback, self.fork, self.abort]
        for _ in range(n_operations):
            if not self.sequences or (len(self.sequences) < 4 and self.rng.random() < 0.1):
                self.sequences.append(ExpectedSequence(self.sequence.BlockStore(self.pool)))
            elif len(self.sequences) > 2 and self.rng.random() < 0.08:
                self.sequences.pop(self.rng.randrange(len(self.sequences))).kv.close()
            self.rng.choice(operations)(self.rng.choice(self.sequences))
            self.check()
        for text in self.sequences:
            text.kv.close()
        assert self.pool.is_unused
        assert self.pool.n_free == N_BLOCKS
        self.pool.free()

    # --- operations --------------------------------------------------------------------------

    def append(self, text: ExpectedSequence) -> None:
        self.abort(text)
        num_tokens = self.rng.choice([1, 3, 20, 63, 64, 65, 100])
        numbers = self.write(text, len(text.committed), num_tokens)
        if numbers:
            text.kv.append([0] * num_tokens)
            text.committed += numbers

    def grow(self, text: ExpectedSequence) -> None:
        parents = []
        nodes = [PREFIX, *text.kv.table.ids]
        for node in range(text.kv.table.next_id, text.kv.table.next_id + self.rng.randint(1, 12)):
            parents.append(self.rng.choice(nodes))
            nodes.append(node)
        first = text.kv.table.num_tokens
        ids = text.kv.add(parents, [0] * len(parents))
        numbers = self.write(text, first, len(ids))
        text.live.update(zip(ids, numbers, strict=False))
        if not numbers:
            self.abort(text)

    def commit(self, text: ExpectedSequence) -> None:
        table = text.kv.table
        path: list[int] = []
        while below := self.children(text, path[-1] if path else PREFIX):
            if self.rng.random() < 0.3:
                break
            path.append(self.rng.choice(below))
        keep = [node for node in below if self.rng.random() < 0.5]
        text.kv.commit(path, keep)
        text.committed += [text.live[node] for node in path]
        text.live = {node: text.live[node] for node in table.ids}

    def prune(self, text: ExpectedSequence) -> None:
        text.kv.prune([node for node in text.kv.table.ids if self.rng.random() < 0.2])
        text.live = {node: text.live[node] for node in text.kv.table.ids}

    def rollback(self, text: ExpectedSequence) -> None:
        length = self.rng.randint(0, len(text.committed))
        text.kv.rollback(length)
        text.committed, text.live = text.committed[:length], {}

    def abort(self, text: ExpectedSequence) -> None:
        n_intact = self.rng.choice([None, len(text.committed), len(text.committed) // 2])
        text.kv.abort(n_intact)
        text.committed, text.live = text.committed[:n_intact], {}

    def fork(self, text: ExpectedSequence) -> None:
        if len(self.sequences) < 6:
            length = self.rng.randint(0, len(text.committed))
            self.sequences.append(ExpectedSequence(text.kv.fork(length), text.committed[:length]))

    # --- what they do ------------------------------------------------------------------------

    def children(self, text: ExpectedSequence, node: int) -> list[int]:
        return [item for item in text.kv.table.ids if text.kv.table.parents[item] == node]

    def write(self, text: ExpectedSequence, first: int, num_tokens: int) -> list[int]:
        """New numbers in these rows; none where the pool is full, as it said beforehand."""
        n_blocks, n_free = text.kv.n_blocks_for(first + num_tokens - text.kv.table.num_tokens), None
        if first == text.kv.table.num_tokens:
            n_free = self.pool.n_free
        try:
            places = text.kv.make_capacity(first, num_tokens)
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
        users = Counter(block for text in self.sequences for block in text.kv.blocks.tolist())
        assert self.pool.n_free == N_BLOCKS - len(users)
        assert self.pool.n_shared == users.total() - len(users)
        for text in self.sequences:
            num_tokens = len(text.rows)
            text.kv.check_integrity()
            assert len(text.kv.blocks) == -(-num_tokens // BLOCK_SIZE)
            if num_tokens:
                at = torch.from_numpy(
                    rows_in_pool(text.kv.blocks, torch.arange(num_tokens).numpy())
                )
                layer = self.pool.layers[0]
                assert layer.keys[0, 0, at, 0].tolist() == text.rows
                assert layer.values[0, 0, at, 0].tolist() == [-number for number in text.rows]
