"""Switch for ggml's tiled products of K-quants and IQ-quants.

A tile has eight rows or more and sums in another order than a row alone. How many tokens an expert
gets depends on the other tokens of a pass, so a mixture is exact only without tiles. ggml reads the
switch from the environment at its first such product, once in a process.
"""

from __future__ import annotations

import os

from backends.ggml.batch_invariance import Product, find_min_batch_tokens, product_runs

_SWITCH = "GGML_CPU_TILED_MM"
_TRIAL = Product(type_id=12, n_in=1024, n_out=64)  # Q4_K
_left_out: list[str] = []


def leave_out_tiles() -> None:
    """Turn tiles off for the life of this process, unless ggml has used them before or the
    environment turns them on."""
    if _left_out:
        return
    is_unset = _SWITCH not in os.environ
    if is_unset:
        os.environ[_SWITCH] = "0"
    try:
        if find_min_batch_tokens(product_runs(_TRIAL, threads=(1,))) == 1:
            _left_out.append("without tiles")
    finally:
        if is_unset:  # other programs that this process starts decide for themselves
            del os.environ[_SWITCH]


def kernels_in_use() -> str:
    """Return a part of cache keys that depend on ggml's products; empty for the default ones."""
    return " ".join(_left_out)
