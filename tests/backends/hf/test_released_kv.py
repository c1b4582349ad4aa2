"""Unused KV blocks are given back to the system, and the rows of sequences stay."""

from __future__ import annotations

import mmap

import torch

from backends.attention.batch import BLOCK_SIZE
from backends.kv.pool import KvPool
from backends.kv.sequence import BlockStore
from offload.process.memory import process_memory
from offload.units import MIB

N_HEADS, DIM, N_BLOCKS = 4, 512, 128
BLOCK_BYTES = 2 * N_HEADS * DIM * BLOCK_SIZE * 4  # keys and values in float32


def write(pool: KvPool, kv: BlockStore, value: float, num_tokens: int) -> None:
    first = kv.table.n_committed
    kv.make_writable(first)
    kv.take_blocks(first, num_tokens)
    pool.begin(kv.rows(first, num_tokens))
    states = torch.full((1, N_HEADS, num_tokens, DIM), value)
    pool.layers[0].update(states, -states)
    kv.append([0] * num_tokens)


def rows(pool: KvPool, kv: BlockStore) -> torch.Tensor:
    keys = pool.layers[0].keys
    assert keys is not None
    blocks = keys.unflatten(2, (-1, BLOCK_SIZE))[0, :, torch.from_numpy(kv.places)]
    return blocks.flatten(1, 2)[:, : kv.table.n_committed]


def test_released_blocks_take_no_memory_and_others_stay() -> None:
    assert (DIM * BLOCK_SIZE * 4) % mmap.PAGESIZE == 0
    pool = KvPool(1, N_BLOCKS)
    kvs = [BlockStore(pool) for _ in range(8)]
    for i, kv in enumerate(kvs):
        write(pool, kv, 1.0 + i, N_BLOCKS // 8 * BLOCK_SIZE - i)
    assert pool.n_touched == N_BLOCKS
    before = process_memory().rss_bytes
    for i in (1, 2, 5):
        kvs[i].close()
    n_unused = 3 * N_BLOCKS // 8
    assert pool.unused_bytes == n_unused * BLOCK_BYTES
    pool.release_unused()
    freed = before - process_memory().rss_bytes
    assert abs(freed - n_unused * BLOCK_BYTES) < 2 * MIB
    assert pool.unused_bytes == 0
    assert pool.n_bytes == (N_BLOCKS - n_unused) * BLOCK_BYTES
    assert pool.n_free == n_unused
    for i in (0, 3, 4, 6, 7):
        assert (rows(pool, kvs[i]) == 1.0 + i).all()
    again = BlockStore(pool)
    write(pool, again, 99.0, n_unused * BLOCK_SIZE)
    assert (rows(pool, again) == 99.0).all()
    for i in (0, 3, 4, 6, 7):
        assert (rows(pool, kvs[i]) == 1.0 + i).all()
    pool.free()
