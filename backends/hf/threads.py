"""Thread count of torch, and the size of oneDNN's kernel caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from offload.process.cpus import threads_for_load, usable_cpus

_CACHES_OF_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Cache sizes of oneDNN and of its wrapper in torch (ideep)."""
_MAX_KERNELS = 32
"""Kernels per cache, one for each shape of a product, and passes have any number of tokens. With
the libraries' default of 1 024 the embedded pair grew from 325 to 569 MiB in eight steps of 16
sequences; with 32, from 331 to 384 MiB at the same speed (EPYC Zen 4)."""


def use_threads(n_threads: int | None) -> int:
    """Set torch's thread count and return it; None: torch's default, limited to the CPUs that the
    process may use."""
    n_threads = n_threads or min(_default_threads(), usable_cpus())
    torch.set_num_threads(n_threads)
    return n_threads


@cache
def _default_threads() -> int:
    """Return the thread count that torch had before we changed it."""
    return torch.get_num_threads()


@contextmanager
def threads_of_pass(n_threads: int | None, follows_load: bool) -> Iterator[None]:
    """Set torch's thread count inside, limited to the CPUs that other programs leave free if
    `follows_load`; None: unchanged.

    Torch has one count for all models of a process, and a thread starts with the one that was set
    last anywhere. So every pass sets its own: with another, its bits might differ.
    """
    before = torch.get_num_threads()  # first: later a new thread would see another thread's count
    num_threads = n_threads or before
    if follows_load:
        num_threads = threads_for_load(num_threads)
    if num_threads != before:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if num_threads != before:
            torch.set_num_threads(before)


def keep_few_kernels() -> None:
    """Limit the kernel caches. Call before the first product of the process, when the libraries
    read the limit; a setting of the user is respected."""
    for name in _CACHES_OF_KERNELS:
        os.environ.setdefault(name, str(_MAX_KERNELS))
