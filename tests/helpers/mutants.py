"""Modules made anew from their own source with one mistake in it.

A test that no wrong rule can fail proves nothing: every mistake must be caught.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType

import numpy as np

from specdec.sampling.processors import SamplingError


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with the one place `old` of its source changed to `new`.

    Nothing else sees the copy: whoever imported names from the module keeps the right ones.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is no longer one place of {module.__name__}"
    changed = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"mutant of {module.__name__}", "exec"), vars(changed))
    return changed


def is_caught(
    module: ModuleType, mistake: tuple[str, str], check: Callable[[ModuleType], bool]
) -> bool:
    """Whether `check` fails the module with the mistake: by a wrong result, or by an error."""
    changed = mutated(module, *mistake)
    with np.errstate(all="ignore"):
        try:
            return not check(changed)
        except (ValueError, IndexError, SamplingError):
            return True
