"""What of the machine torch may use: threads, and memory for compiled kernels."""

from __future__ import annotations

import os
from functools import cache

import torch

from offload.process.cpus import threads_for_load, usable_cpus

_CACHES_OF_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's, and that of its wrapper in torch (ideep)."""
_MOST_KERNELS = 32
"""In each. A product's shape has one, and passes have any number of rows: with up to 1 024, as the
libraries have it, the embedded pair grew from 325 to 569 MiB in eight rounds of 16 texts, and from
331 to 384 with 32, at the same speed (EPYC Zen 4)."""


def use_threads(n_threads: int | None) -> int:
    """Let torch compute with so many, which is returned; None: as it does, within what the process
    may use."""
    n_threads = n_threads or min(_default_threads(), usable_cpus())
    torch.set_num_threads(n_threads)
    return n_threads


@cache
def _default_threads() -> int:
    """Return what torch, or whoever set it up before us, wanted at first."""
    return torch.get_num_threads()


def follow_load(max_threads: int) -> None:
    """Let this thread's next products use the processors that other programs leave free."""
    n_threads = threads_for_load(max_threads)
    if n_threads != torch.get_num_threads():
        torch.set_num_threads(n_threads)


def keep_few_kernels() -> None:
    """Before the first product of the process, when the libraries look; the user's own setting
    stands."""
    for name in _CACHES_OF_KERNELS:
        os.environ.setdefault(name, str(_MOST_KERNELS))
