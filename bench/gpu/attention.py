"""Time of two implementations of a tree pass's attention on a device.

`whole` is what transformers does with a mask over all keys: keys and values repeated for every
query head, then SDPA. `segments` is backends/attention/segments.py. Both get the same tensors, and
their outputs are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from backends.attention.batch import BatchLayout
from backends.attention.layout import PassLayout
from backends.attention.masks import additive_mask, segmented_mask
from backends.attention.segments import attend_segments


@dataclass(frozen=True)
class Comparison:
    """Result for one shape: query heads, KV heads, head dimension, tree nodes, context tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    n_nodes: int
    n_context: int
    whole_seconds: float
    segments_seconds: float
    difference: float
    """Largest difference between the two outputs."""


def compare(
    shape: tuple[int, int, int],
    n_nodes: int,
    n_context: int,
    dtype: torch.dtype,
    device: torch.device,
    n_runs: int = 5,
) -> Comparison:
    """Return medians of `n_runs` after a warm-up. shape: heads, kv heads, head dim."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)

    def states(n_heads: int, num_tokens: int) -> torch.Tensor:
        rows = torch.randn(1, n_heads, num_tokens, dim, generator=generator)
        return rows.to(device, dtype)

    query = states(heads, n_nodes)
    key, value = states(kv_heads, n_context + n_nodes), states(kv_heads, n_context + n_nodes)
    layout = _random_tree(n_context, n_nodes)
    mask = additive_mask(BatchLayout.of(layout), 0, n_nodes, None, dtype, device)
    segments = segmented_mask(BatchLayout.of(layout), 0, n_nodes, None, dtype, device)

    def whole() -> torch.Tensor:
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, k, v, attn_mask=mask).transpose(1, 2)

    def in_segments() -> torch.Tensor:
        return attend_segments(query, key, value, segments, dim**-0.5)

    with torch.inference_mode():
        difference = float((whole() - in_segments()).abs().max())
        whole_seconds = _median_seconds(whole, device, n_runs)
        seconds = _median_seconds(in_segments, device, n_runs)
    return Comparison(heads, kv_heads, dim, n_nodes, n_context, whole_seconds, seconds, difference)


def _random_tree(prefix: int, n_nodes: int) -> PassLayout:
    rng = np.random.default_rng(0)
    visible, depths = np.eye(n_nodes, dtype=bool), np.zeros(n_nodes, dtype=np.int64)
    for node in range(1, n_nodes):
        parent = int(rng.integers(node))
        visible[node] |= visible[parent]
        depths[node] = depths[parent] + 1
    return PassLayout(prefix, prefix + depths, visible)


def _median_seconds(run: Callable[[], torch.Tensor], device: torch.device, n_runs: int) -> float:
    seconds = []
    for _ in range(1 + n_runs):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])
