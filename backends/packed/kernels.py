"""Choice of compiled code: numba is an extra.

Coding of twelve-bit planes can do without it, in four times the time and to the same bits.
Computing with stored matrices on the CPU cannot, so `specdec pack` asks for it, too.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

from backends.contract.backend import UnsupportedModel
from offload.distribution import install_command


def has_numba() -> bool:
    """Return whether the extra `pack` is installed."""
    return find_spec("numba") is not None


def check_numba() -> None:
    """Raise UnsupportedModel where the extra `pack` is not installed."""
    if not has_numba():
        raise UnsupportedModel(
            "packed and quantised weights are decoded on the CPU by loops that numba compiles: "
            f"{install_command('pack')}"
        )


def tile_products() -> ModuleType:
    """Return backends.tiles.calls, which needs numba. Raises UnsupportedModel without it."""
    check_numba()
    from backends.tiles import calls

    return calls


@cache
def fastest_kernels() -> ModuleType:
    if has_numba():
        from backends.packed import by_numba

        return by_numba
    from backends.packed import by_numpy

    return by_numpy
