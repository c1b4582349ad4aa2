"""GPU memory of a model's KV cache, with the rounding of torch's allocator."""

from __future__ import annotations

from collections import Counter

from backends.attention.batch import BLOCK_SIZE
from backends.hf.model import HfModel
from backends.kv.pool import blocks_of
from offload.units import MIB

_BLOCK_BYTES = 512
_SMALL_BYTES, _SMALL_SEGMENT_BYTES = MIB, 2 * MIB
_LARGE_BYTES, _LARGE_SEGMENT_BYTES = 10 * MIB, 20 * MIB
_ROUND_BYTES = 2 * MIB


def allocated_bytes(n_bytes: int, n_tensors: int = 1) -> int:
    """Return the device memory that `n_tensors` tensors of `n_bytes` each take together.

    torch cuts small tensors from segments of 2 MiB, tensors of 1 to 10 MiB from segments of 20 MiB,
    and rounds larger ones up to 2 MiB (c10/cuda/CUDACachingAllocator.cpp).
    """
    n_bytes = _up(n_bytes, _BLOCK_BYTES)
    if n_bytes >= _LARGE_BYTES:
        return n_tensors * _up(n_bytes, _ROUND_BYTES)
    segment = _SMALL_SEGMENT_BYTES if n_bytes <= _SMALL_BYTES else _LARGE_SEGMENT_BYTES
    return -(-n_tensors // (segment // max(n_bytes, _BLOCK_BYTES))) * segment


def cache_bytes(model: HfModel, num_tokens: int) -> int:
    """Return the bytes of a KV cache for `num_tokens`: keys and values of all layers, allocated in
    full size from the start."""
    num_rows = blocks_of(num_tokens) * BLOCK_SIZE
    sizes = Counter(num_rows * n_bytes for layer in model.stored_kv_bytes for n_bytes in layer)
    return sum(allocated_bytes(size, n_tensors) for size, n_tensors in sizes.items())


def _up(n_bytes: int, step: int) -> int:
    return -(-n_bytes // step) * step
