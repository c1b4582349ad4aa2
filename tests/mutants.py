"""Modules made anew from their own source with one mistake in it."""

from __future__ import annotations

import inspect
from types import ModuleType


def mutated(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with the one place `old` of its source changed to `new`.

    Nothing else sees the copy: whoever imported names from the module keeps the right ones.
    """
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} is no longer one place of {module.__name__}"
    changed = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"mutant of {module.__name__}", "exec"), vars(changed))
    return changed
