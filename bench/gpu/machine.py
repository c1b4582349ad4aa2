"""Measurements of the GPU itself: memory, link, products and logits, each alone."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from bench.gpu.settings import Note, Settings
from specdec.run_options import CPU, CUDA

_N_RUNS, _PER_RUN = 5, 4
_ALIGNMENTS = (("round", 0), ("8 bytes on", 8))
_PRODUCT, _VOCAB_SIZE = (13824, 5120), 32000
_ROWS, _CONTEXTS = (1, 128, 1024), (1024, 8192)
_HEADS = ((40, 40, 128), (32, 8, 128))
"""Shapes of the large target, and with grouped queries: heads, KV heads, head dimension."""


def machine(s: Settings, note: Note) -> None:
    """Note the GPU and its link; the rest of the machine is in the report's provenance."""
    if s.device == CPU:
        note("device", "cpu")
        return
    import torch

    from backends.cuda.probe import cuda_memory, measure_copies_to_gpu

    memory = cuda_memory()
    note("device", memory.name)
    note("vram_bytes", memory.total_bytes)
    note("vram_free_bytes", memory.free_bytes)
    note("cuda", torch.version.cuda)
    note("pinned_copy_bytes_per_second", measure_copies_to_gpu())
    for name, value in alone(CUDA, _PRODUCT, _ROWS, _VOCAB_SIZE).items():
        note(name, value)
    note("attention", attention(CUDA, _HEADS, _ROWS, _CONTEXTS))


def alone(
    device: str, shape: tuple[int, int], rows: Sequence[int], vocab_size: int
) -> dict[str, Any]:
    """Return seconds by number of tokens of bf16 products, with weights at a round address or 8
    bytes after one, as in files; and of copying logits to the host."""
    import torch

    def product(offset: int, num_tokens: int) -> float:
        n_out, n_in = shape
        raw = torch.zeros(2 * n_out * n_in + offset, dtype=torch.uint8, device=device)
        weight = raw[offset:].view(torch.bfloat16).view(n_out, n_in).normal_()
        x = torch.randn(num_tokens, n_in, dtype=torch.bfloat16, device=device)
        return _seconds(partial(torch.nn.functional.linear, x, weight), device)

    def logits(num_tokens: int) -> float:
        result = torch.randn(num_tokens, vocab_size, dtype=torch.bfloat16, device=device)
        return _seconds(lambda: result.cpu().float().numpy(), device)

    return {
        "product_seconds": {
            name: {str(n): product(offset, n) for n in rows} for name, offset in _ALIGNMENTS
        },
        "logits_to_host_seconds": {str(n): logits(n) for n in rows},
    }


def attention(
    device: str,
    heads: Sequence[tuple[int, int, int]],
    nodes: Sequence[int],
    contexts: Sequence[int],
) -> list[dict[str, Any]]:
    """Return the times of both implementations of a tree's attention."""
    import torch

    from bench.gpu.attention import compare

    return [
        asdict(compare(*shape, torch.bfloat16, torch.device(device)))
        for shape in itertools.product(heads, nodes, contexts)
    ]


def vram_outside_torch() -> int:
    """Return the VRAM of CUDA's context and kernels (estimated by plans) and of other programs."""
    from backends.cuda.probe import cuda_memory

    memory = cuda_memory()
    return memory.total_bytes - memory.free_bytes - memory.used_bytes


def _seconds(work: Callable[[], object], device: str) -> float:
    """Return seconds per call of several consecutive calls; the median of a few runs."""
    import torch

    def wait() -> None:
        if device == CUDA:
            torch.cuda.synchronize()

    def run() -> float:
        wait()
        began = time.perf_counter()
        for _ in range(_PER_RUN):
            work()
        wait()
        return (time.perf_counter() - began) / _PER_RUN

    return statistics.median([run() for _ in range(1 + _N_RUNS)][1:])
