"""Threads that torch computes with, and memory for its compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from offload.process.cpus import threads_for_load, usable_cpus

_CACHES_OF_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's, and that of its wrapper in torch (ideep)."""
_MAX_KERNELS = 32
"""In each. A product's shape has one, and passes have any number of rows: with up to 1 024, as the
libraries have it, the embedded pair grew from 325 to 569 MiB in eight steps of 16 sequences, and from
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


@contextmanager
def threads_of_pass(n_threads: int | None, follows_load: bool) -> Iterator[None]:
    """Let torch compute with so many threads inside, or with as many of them as other programs
    leave free; None: as it is set.

    Torch has one number for all models of a process, and a thread begins with the one that was set
    last anywhere. So every pass sets its own: another model's may not keep their bits with it.
    """
    before = torch.get_num_threads()  # asked first: a new thread would take another's afterwards
    requested = n_threads or before
    if follows_load:
        requested = threads_for_load(requested)
    if requested != before:
        torch.set_num_threads(requested)
    try:
        yield
    finally:
        if requested != before:
            torch.set_num_threads(before)


def keep_few_kernels() -> None:
    """Before the first product of the process, when the libraries look; the user's own setting
    stands."""
    for name in _CACHES_OF_KERNELS:
        os.environ.setdefault(name, str(_MAX_KERNELS))
