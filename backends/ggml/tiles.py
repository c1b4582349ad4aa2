"""ggml's tiled products of K-quants and IQ-quants.

A tile takes eight rows or more and sums in another order than a row alone. How many rows an expert
gets depends on the other rows of a pass, so a mixture is exact only where no tiles are used. ggml
reads the switch from the environment at its first such product, once in a process.
"""

from __future__ import annotations

import os

from backends.ggml.batch_invariance import Product, find_min_batch_tokens, product_runs

_SWITCH = "GGML_CPU_TILED_MM"
_TRIAL = Product(type_id=12, n_in=1024, n_out=64)  # Q4_K
_left_out: list[str] = []


def leave_out_tiles() -> None:
    """In this process, and for good. Where ggml has used them before, or the environment asks for
    them, they stay."""
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
    """A part of the key of what depends on ggml's products; empty where they are the usual ones."""
    return " ".join(_left_out)
