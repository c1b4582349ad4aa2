"""What of the machine torch may use: threads, and memory for compiled kernels."""

from __future__ import annotations

import os

import torch

from offload.process.cpus import usable_cpus

_CACHES_OF_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's, and that of its wrapper in torch (ideep)."""
_MOST_KERNELS = 32
"""In each. A product's shape has one, and passes have any number of rows: with up to 1 024, as the
libraries have it, the embedded pair grew from 325 to 569 MiB in eight rounds of 16 texts, and from
331 to 384 with 32, at the same speed (EPYC Zen 4)."""


def use_threads(n_threads: int | None) -> None:
    """Let torch compute with so many; None: as it does, within what the process may use."""
    torch.set_num_threads(n_threads or min(torch.get_num_threads(), usable_cpus()))


def keep_few_kernels() -> None:
    """Before the first product of the process, when the libraries look; the user's own setting
    stands."""
    for name in _CACHES_OF_KERNELS:
        os.environ.setdefault(name, str(_MOST_KERNELS))
