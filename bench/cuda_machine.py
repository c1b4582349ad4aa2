"""The GPU itself: its memory, its link, products and logits, each alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.cuda_settings import Note, Settings
from specdec.options import CPU, CUDA

_N_RUNS = 10
_PRODUCT, _PRODUCT_ROWS = (13824, 5120), (1, 128, 1024)
_ALIGNMENTS = {"round": 0, "8 bytes on": 8}
_VOCAB_SIZE = 32000
_HEADS = ((40, 40, 128), (32, 8, 128))  # of queries and of keys, and numbers in each
_NODES, _CONTEXTS = (1, 64, 1024), (1024, 8192)


def machine(s: Settings, note: Note) -> None:
    """The GPU and its link; the rest of the machine is in the report's provenance."""
    if s.device == CPU:
        note("device", "cpu")
        return
    import torch

    from backends.cuda_probe import cuda_memory, measure_copies_to_gpu

    memory = cuda_memory()
    note("device", memory.name)
    note("vram_bytes", memory.total_bytes)
    note("vram_free_bytes", memory.free_bytes)
    note("cuda", torch.version.cuda)
    note("pinned_copy_bytes_per_second", measure_copies_to_gpu())
    note("product_seconds", {name: _product_seconds(at) for name, at in _ALIGNMENTS.items()})
    note("logits_to_host_seconds", _logits_to_host_seconds())
    note("attention", _attention())


def _attention() -> list[dict[str, Any]]:
    """Of a tree, both ways, in the large target's shape and in one with shared keys."""
    import torch

    from bench.attention import compare

    device = torch.device(CUDA, 0)
    return [
        asdict(compare(heads, n_nodes, n_context, torch.bfloat16, device))
        for heads, n_nodes, n_context in itertools.product(_HEADS, _NODES, _CONTEXTS)
    ]


def _product_seconds(offset: int) -> dict[str, float]:
    """Of bf16 products by rows, with weights that begin so many bytes behind a round address, as
    files have them."""
    import torch

    n_out, n_in = _PRODUCT
    raw = torch.zeros(2 * n_out * n_in + offset, dtype=torch.uint8, device=CUDA)
    weight = raw[offset:].view(torch.bfloat16).view(n_out, n_in).normal_()
    rows = {n: torch.randn(n, n_in, dtype=torch.bfloat16, device=CUDA) for n in _PRODUCT_ROWS}
    linear = torch.nn.functional.linear
    return {str(n): _device_seconds(partial(linear, x, weight)) for n, x in rows.items()}


def _logits_to_host_seconds() -> dict[str, float]:
    """Of bringing logits of a usual vocabulary, as a pass does it, by rows."""
    import torch

    from backends.model_forward import on_host

    def seconds(n_rows: int) -> float:
        logits = torch.randn(n_rows, _VOCAB_SIZE, dtype=torch.bfloat16, device=CUDA)
        return _host_seconds(partial(on_host, logits))

    return {str(n): seconds(n) for n in _PRODUCT_ROWS}


def vram_outside_torch() -> int:
    """CUDA's context and kernels, for which a plan assumes a figure; and what others have taken."""
    from backends.cuda_probe import cuda_memory

    memory = cuda_memory()
    return memory.total_bytes - memory.free_bytes


def _device_seconds(work: Callable[[], object]) -> float:
    """By events, on the device's clock."""
    import torch

    def timed() -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3  # milliseconds

    return statistics.median([timed() for _ in range(1 + _N_RUNS)][1:])


def _host_seconds(work: Callable[[], object]) -> float:
    """By the host's clock, all that the device has to do included."""
    import torch

    def timed() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return statistics.median([timed() for _ in range(1 + _N_RUNS)][1:])
