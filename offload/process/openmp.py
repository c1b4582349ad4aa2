"""Wait policy of OpenMP's threads, set while libgomp is loaded.

At the end of every product its threads meet at a barrier. A thread that spins there for long takes
its processor away from other programs, and from the very thread that it waits for; one that sleeps
at once is woken by the kernel hundreds of times a forward pass. A short spin is nearly the best of
both (docs/benchmarks.md, "A busy machine").
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

TORCH_SPINS = 20_000
LLAMA_SPINS = 2_000
"""Iterations of libgomp's spin loop before a thread sleeps. torch and llama.cpp have a libgomp
each, which reads the number when it is loaded. Between two products of torch Python runs; between
those of llama.cpp only microseconds pass."""
_SPIN_COUNT = "GOMP_SPINCOUNT"
_SETTINGS_OF_USERS = ("OMP_WAIT_POLICY", _SPIN_COUNT)


@contextmanager
def bounded_spinning(n_spins: int) -> Iterator[None]:
    """Make a libgomp loaded inside the block spin `n_spins` times; a user's own setting has
    precedence. Programs started later do not inherit it.
    """
    if any(name in os.environ for name in _SETTINGS_OF_USERS):
        yield
        return
    os.environ[_SPIN_COUNT] = str(n_spins)
    try:
        yield
    finally:
        del os.environ[_SPIN_COUNT]
