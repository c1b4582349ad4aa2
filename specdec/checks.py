"""Checks that the configurations share: a wrong value is named with what would be accepted."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from offload.errors import SpecdecError


class ConfigError(SpecdecError, ValueError):
    """An option is unknown, out of range, not supported, or contradicts another one."""


def as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r}, must be a number")
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise ConfigError(f"{name} is an integer too large to compute with: lower it") from None


def check(
    name: str,
    value: Any,
    kind: type,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise ConfigError unless value is None or a `kind` from low to high, both included or not."""
    if value is None:
        return
    wanted = (int, float) if kind is float else (kind,)
    bounds = f"above {low}" if open_low else f"at least {low}"
    bounds += "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high}"
    is_right_kind = isinstance(value, wanted) and not isinstance(value, bool)
    is_at_open_end = (open_low and value == low) or (open_high and value == high)
    if not is_right_kind or not low <= value <= high or is_at_open_end:
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name} is {value!r}, must be {noun} {bounds}")


def check_type(name: str, value: Any, *kinds: type) -> None:
    """Raise ConfigError unless value is of one of `kinds`; True and False are no integers."""
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, kinds) or is_stray_bool:
        wanted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is {value!r}, must be {wanted}")


class UnknownOption(ConfigError, TypeError):
    """No option has this name."""


def refuse_unknown(options: Mapping[str, Any], kind: type, called: str | None = None) -> None:
    """Raise UnknownOption, with the nearest name, for what is no field of `kind`.

    called: by what it is that has no such option; the kind's name if None.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise UnknownOption(f"{called or kind.__name__} has no option {name!r}{hint}")
