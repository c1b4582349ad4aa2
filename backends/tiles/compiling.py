"""Compilation by numba, with the machine code cached on disk.

numba compiles for the processor that it runs on. The cache is beside the source or in the user's
cache folder; if neither is writable, functions are compiled once per process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function for these types; it does not hold Python's lock while it runs."""
    return _cached(lambda cache: numba.njit(signature, nogil=True, cache=cache))


def compiled_lazily(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the types of its first call."""
    return compiled(None)(function)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as a part of its callers; they are cached, and it is not. A quotient
    by 0 is infinite or NaN: nobody would see an exception."""
    helper: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy")(function)
    return helper


def compiled_callback(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that is called by its address."""
    return _cached(lambda cache: numba.cfunc(signature, cache=cache, error_model="numpy"))


def _cached(decorate: Callable[[bool], Any]) -> Callable[[Callable[..., Any]], Any]:
    def compile_function(function: Callable[..., Any]) -> Any:
        try:
            return decorate(True)(function)
        except (RuntimeError, OSError):  # no writable cache folder, or no space there
            return decorate(False)(function)

    return compile_function
