"""Find the number of rows from which on ggml's operators are batch-invariant.

A product or attention uses one of several kernels by its number of rows, and each kernel sums in an
order of its own. The thresholds depend on the processor and on llama.cpp's build, so operators are
tested: with a row alone, beside others, and in other places of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from backends.ggml.operators import F16, F32, I32, Ggml, load_ggml
from offload.units import MIB

CANDIDATES = (1, 2, 4, 8, 16)
"""Numbers of tokens that a pass may be padded to."""
_COUNTS = (65, 33, 17, 16, 15, 9, 8, 7, 5, 4, 3, 2, 1)
_NUM_TOKENS = 80
_N_HEADS, _N_EXPERTS, _N_CHOSEN = 2, 4, 2
_FIRST_VISIBLE, _FEW_CELLS, _MANY_CELLS = 300, 512, 1024
"""Cells that row 0 attends to (row i: i more), and the sizes of two caches."""
_SAMPLE_VALUES = 8192
RowsOf = Callable[[int, int], np.ndarray]
"""(start, n) -> results [n, ...] of rows start .. start + n - 1, computed together."""


@dataclass(frozen=True, order=True)
class Product:
    """A matrix [n_out, n_in] in a number format, or one for each expert."""

    type_id: int
    n_in: int
    n_out: int
    has_experts: bool = False


@dataclass(frozen=True, order=True)
class Attention:
    """An attention head: lengths and ggml types of keys and values."""

    key_length: int
    value_length: int
    type_k: int
    type_v: int


def fewer_outputs(n_out: int, n_threads: int) -> int:
    """Return a smaller number of outputs that takes the same kernels as `n_out`: they depend on
    multiples, and on sixteen outputs for each thread."""
    minimum = 64 * max(1, -(-n_threads // 4))
    return min(n_out, minimum + n_out % 64)


def find_min_batch_tokens(runs: Iterable[RowsOf]) -> int | None:
    """Return the smallest candidate from which on all runs give a row the same bits, or None."""
    runs = list(runs)
    expected = runs[0](0, _NUM_TOKENS)
    n_bad = 0
    for run in runs:
        for i, n in enumerate(_COUNTS):  # descending: below a difference there is nothing to learn
            start = 37 * i % (_NUM_TOKENS - n + 1)
            if n > n_bad and not np.array_equal(run(start, n), expected[start : start + n]):
                n_bad = n
        if n_bad >= CANDIDATES[-1]:
            return None
    return next(n for n in CANDIDATES if n > n_bad)


def product_runs(
    product: Product, threads: Sequence[int], blocks: np.ndarray | None = None
) -> list[RowsOf]:
    """Return a run for each number of threads.

    blocks: bytes [n, bytes of a block] to make the matrix of; None: random ones.

    Raises ValueError for a format that ggml cannot quantize to.
    """
    ggml, rng = load_ggml(), np.random.default_rng(product.n_in)
    n_matrices = _N_EXPERTS if product.has_experts else 1
    shape = (n_matrices * product.n_out, product.n_in)
    weights = _matrix(ggml, product.type_id, shape, rng, blocks)
    x = rng.standard_normal((_NUM_TOKENS, product.n_in), dtype=np.float32)
    chosen = rng.permuted(np.tile(np.arange(_N_EXPERTS, dtype=np.int32), (_NUM_TOKENS, 1)), axis=1)
    n_bytes = weights.nbytes + 8 * _NUM_TOKENS * (product.n_in + 4 * product.n_out) + 4 * MIB

    def run(n_threads: int, start: int, num_tokens: int) -> np.ndarray:
        rows = slice(start, start + num_tokens)
        with ggml.context(n_bytes) as context:
            if product.has_experts:
                experts = (n_matrices, product.n_out, product.n_in)
                matrix = ggml.tensor(context, product.type_id, experts, weights)
                b = ggml.tensor(context, F32, (num_tokens, 1, product.n_in), x[rows])
                few = chosen[rows, :_N_CHOSEN]
                ids = ggml.tensor(context, I32, (num_tokens, _N_CHOSEN), few)
                result = ggml.mul_mat_id(context, matrix, b, ids)
            else:
                matrix = ggml.tensor(context, product.type_id, shape, weights)
                b = ggml.tensor(context, F32, (num_tokens, product.n_in), x[rows])
                result = ggml.mul_mat(context, matrix, b)
            return ggml.run(context, result, n_threads).reshape(num_tokens, -1)

    return [partial(run, n_threads) for n_threads in threads]


def attention_runs(kind: Attention, threads: Sequence[int]) -> list[RowsOf]:
    """Return runs over the same cells, contiguous in a small and a larger cache and with gaps, for
    each number of threads."""
    ggml, rng = load_ggml(), np.random.default_rng(kind.key_length)
    n_cells = _FIRST_VISIBLE + _NUM_TOKENS
    queries = rng.standard_normal((_N_HEADS, _NUM_TOKENS, kind.key_length), dtype=np.float32)
    keys, values = (
        _matrix(ggml, type_id, (n_cells, length), rng, _blocks(ggml, type_id, 1.0, rng))
        for type_id, length in ((kind.type_k, kind.key_length), (kind.type_v, kind.value_length))
    )
    spread = np.sort(rng.permutation(_MANY_CELLS)[:n_cells])

    def place(places: np.ndarray, size: int, n_threads: int) -> RowsOf:
        k, v = (np.zeros((size, part.shape[1]), np.uint8) for part in (keys, values))
        k[places], v[places] = keys, values
        mask = np.full((_NUM_TOKENS, size), -np.inf, dtype=np.float16)
        for i in range(_NUM_TOKENS):
            mask[i, places[: _FIRST_VISIBLE + i]] = 0

        def run(start: int, num_tokens: int) -> np.ndarray:
            rows = slice(start, start + num_tokens)
            with ggml.context(16 * MIB + 8 * queries.nbytes + k.nbytes + v.nbytes) as context:
                parts = (
                    (F32, (_N_HEADS, num_tokens, kind.key_length), queries[:, rows]),
                    (kind.type_k, (1, size, kind.key_length), k),
                    (kind.type_v, (1, size, kind.value_length), v),
                    (F16, (num_tokens, size), mask[rows]),
                )
                made = [ggml.tensor(context, *part) for part in parts]
                scale = kind.key_length**-0.5
                result = ggml.attention(context, *made, scale, 0.0, 0.0)
                return ggml.run(context, result, n_threads).reshape(num_tokens, -1)

        return run

    dense = np.arange(n_cells)
    caches = ((dense, _FEW_CELLS), (dense, _MANY_CELLS), (spread, _MANY_CELLS))
    return [place(*cells, n_threads) for n_threads in threads for cells in caches]


def _matrix(
    ggml: Ggml,
    type_id: int,
    shape: tuple[int, int],
    rng: np.random.Generator,
    blocks: np.ndarray | None,
) -> np.ndarray:
    """Return the bytes of a matrix [rows, bytes of a row], of blocks drawn from `blocks`."""
    num_tokens, n_columns = shape
    if blocks is None:
        blocks = _blocks(ggml, type_id, n_columns**-0.5, rng)
    block = ggml.block_size(type_id)
    if n_columns % block:
        raise ValueError(f"ggml has no rows of {n_columns} numbers in type {type_id}")
    drawn: np.ndarray = blocks[rng.integers(0, len(blocks), num_tokens * n_columns // block)]
    return drawn.reshape(num_tokens, -1)


def _blocks(ggml: Ggml, type_id: int, scale: float, rng: np.random.Generator) -> np.ndarray:
    """Return random numbers in a format, as bytes [n, bytes of a block]."""
    block, n_bytes = ggml.block_size(type_id), ggml.block_bytes(type_id)
    if n_bytes == 0:
        raise ValueError(f"ggml has no type {type_id}")
    n_blocks = _SAMPLE_VALUES // block
    drawn = (scale * rng.standard_normal(n_blocks * block)).astype(np.float32)
    weighing = np.ones(block, dtype=np.float32)
    made = np.zeros((n_blocks, n_bytes), dtype=np.uint8)
    addresses = (drawn.ctypes.data, made.ctypes.data)
    n_made = ggml.quantize(type_id, *addresses, 0, n_blocks, block, weighing.ctypes.data)
    if n_made != made.nbytes:
        raise ValueError(f"ggml cannot make numbers of type {type_id}")
    return made
