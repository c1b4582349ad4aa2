"""Choice of the kernels for twelve-bit planes: numba if it is installed, else numpy.

Both give the same bits; numba takes a quarter of the time.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType


def has_numba() -> bool:
    """Return whether the extra `pack` is installed."""
    return find_spec("numba") is not None


def decoding_warnings() -> tuple[str, ...]:
    """Return warnings for the user of a packed model. Loads the kernels, so that their memory is
    measured before a memory plan is made."""
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
