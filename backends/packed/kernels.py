"""What the planes of a tensor are filled and read with: numba where it is installed, else numpy.

Both give the same bits; numba takes a quarter of the time.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType


def has_numba() -> bool:
    """Whether the extra `pack` is installed."""
    return find_spec("numba") is not None


def decoding_warnings() -> tuple[str, ...]:
    """For the user of a packed model. Loads what decodes: its memory is the process's own, and
    measured before a plan."""
    fastest_kernels()
    if has_numba():
        return ()
    return (
        "packed weights are decoded by numpy, which takes four times as long as numba: "
        "pip install 'specdec[pack]'",
    )


@cache
def fastest_kernels() -> ModuleType:
    if has_numba():
        from backends.packed import by_numba

        return by_numba
    from backends.packed import by_numpy

    return by_numpy
