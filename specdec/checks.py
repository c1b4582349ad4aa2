"""Checks that the configurations share; errors name the wrong value and the accepted ones."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from offload.errors import SpecdecError, with_names


class FieldName(str):
    """Name of a configuration's field within an error; interfaces may replace it by their own name.

    also: name of the option in other libraries.
    """

    also: str

    def __new__(cls, name: str, also: str = "") -> Self:
        made = super().__new__(cls, name)
        made.also = also
        return made

    def reported(self, names: Mapping[str, str]) -> str:
        """Return the name, or its replacement in `names`."""
        return names.get(self, f"{self} ({self.also})" if self.also else self)


class ConfigError(SpecdecError, ValueError):
    """An option is unknown, out of range, not supported, or contradicts another one.

    Args:
        parts: parts of the message, in order; fields that it names are FieldNames.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__(*parts)
        self.parts = parts

    def __str__(self) -> str:
        return with_names(self.reported({}))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that the message names, the wrong one first."""
        return tuple(part for part in self.parts if isinstance(part, FieldName))

    def reported(self, names: Mapping[str, str]) -> str:
        """Return the message; names: replacements of field names."""
        return "".join(
            part.reported(names) if isinstance(part, FieldName) else part for part in self.parts
        )


def as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(FieldName(name), f" is {value!r}, must be a number")
    try:
        return float(value)
    except OverflowError:  # an integer of more than 308 digits
        raise ConfigError(
            FieldName(name), " is an integer too large to compute with: lower it"
        ) from None


def check(
    name: str,
    value: Any,
    kind: type,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
    part: str = "",
) -> None:
    """Raise ConfigError unless value is None or a `kind` from low to high, inclusive by default.

    name: name of the field. part: the value's part in the field, such as "a token id of ".
    """
    if value is None:
        return
    kinds = (int, float) if kind is float else (kind,)
    bounds = f"above {low}" if open_low else f"at least {low}"
    bounds += "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high}"
    is_right_kind = isinstance(value, kinds) and not isinstance(value, bool)
    is_at_open_end = (open_low and value == low) or (open_high and value == high)
    if not is_right_kind or not low <= value <= high or is_at_open_end:
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(part, FieldName(name), f" is {value!r}, must be {noun} {bounds}")


def check_type(name: str, value: Any, *kinds: type, part: str = "") -> None:
    """Raise ConfigError unless value is of one of `kinds`; bools are not integers.

    name, part: as in `check`.
    """
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, kinds) or is_stray_bool:
        accepted = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ConfigError(part, FieldName(name), f" is {value!r}, must be {accepted}")


def refuse_loaded(name: str, value: Any) -> None:
    """Raise ConfigError for a model that another library has loaded.

    Its weights lie outside of the budget, and its products need not be those of the layers here,
    so neither the budget nor exactness could be kept.
    """
    libraries = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    if not libraries & {"torch", "transformers", "llama_cpp"}:
        return
    folder = getattr(value, "name_or_path", "") or getattr(value, "model_path", "")
    where = f", here {folder!r}," if folder else ""
    raise ConfigError(
        FieldName(name),
        f" is a loaded {type(value).__name__}: specdec reads the weights itself, into its memory "
        f"budget; give the folder, file or hub id{where} and free the loaded model",
    )


class UnknownOption(ConfigError, TypeError):
    """No option has this name."""


def refuse_unknown(options: Mapping[str, Any], kind: type, called: str | None = None) -> None:
    """Raise UnknownOption, with the nearest name, for an option that is no field of `kind`.

    called: name of `kind` in the message; its class name if None.
    """
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise UnknownOption(f"{called or kind.__name__} has no option {name!r}{hint}")
