"""Option: help, limits and command-line names of a configuration's field.

An option of loading or of sampling is one field of a frozen dataclass with all its metadata: the
command line makes its options from the fields, the configuration checks itself by them, and tests
compare the documentation and the types of `specdec.load` with them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING, dataclass
from typing import Any

from offload.units import UnitError, parse_bytes
from specdec.checks import ConfigError, FieldName, check

# Panels of the help, in their order.
MODELS, MEMORY, SPECULATION, SAMPLING = "Models", "Memory", "Speculation", "Sampling"
BEAMS = "Beams and sequences"
SERVER, LIMITS = "Server", "Limits"


@dataclass(frozen=True)
class Option:
    """Metadata of one option; its name, type and default are the field's."""

    help: str
    panel: str = ""
    """Panel of the command line's help; without one the option is in the Python API only."""
    short: str = ""
    long: str = ""
    """Name on the command line, if it is not the field's name."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    """Inclusive lower limit; its type, int or float, is the value's."""
    above: float | None = None
    """Exclusive lower limit, instead of `at_least`."""
    at_most: float = math.inf
    size: str = ""
    """Accepted values in errors, of an option that is a number of bytes or has its default."""
    shown_default: str | bool = True
    """Text shown in place of the default's value; False shows nothing."""

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that is none of the choices, no number, or out of range.

        None is accepted: it means that the value is chosen later.
        """
        if self.choices and value is not None and value not in self.choices:
            known = ", ".join(self.choices)
            raise ConfigError(FieldName(name), f" is {value!r}, must be one of {known}")
        low = self.at_least if self.above is None else self.above
        if low is not None:
            check(name, value, type(low), low, self.at_most, open_low=self.above is not None)


def option(default: Any, help: str, panel: str = "", **more: Any) -> Any:
    """Return a dataclass field for an option; a default of MISSING makes it required."""
    return dataclasses.field(default=default, metadata={Option: Option(help, panel, **more)})


def required(help: str, panel: str = "", **more: Any) -> Any:
    return option(MISSING, help, panel, **more)


def taken_from(kind: type[Any], name: str) -> Any:
    """Return a field with the default and metadata of another configuration's field."""
    (field,) = (other for other in dataclasses.fields(kind) if other.name == name)
    return dataclasses.field(default=field.default, metadata=field.metadata)


def check_options(configuration: Any) -> None:
    """Raise ConfigError for the first field whose value its option refuses.

    None is accepted only where it is the default, for a value that is chosen later.
    """
    for field in dataclasses.fields(configuration):
        metadata, value = field.metadata.get(Option), getattr(configuration, field.name)
        if metadata is None:
            continue
        if value is None and field.default not in (None, MISSING):
            raise ConfigError(
                FieldName(field.name), f" is None: leave it out for {field.default!r}"
            )
        metadata.check(field.name, value)
        if metadata.size and value != field.default:
            _check_size(field.name, value, metadata.size)


def _check_size(name: str, value: Any, examples: str) -> None:
    """Raise ConfigError for a value that is no number of bytes, or none at all."""
    try:
        n_bytes = parse_bytes(value)
    except UnitError as error:
        raise ConfigError(FieldName(name), f": {error}") from error
    if not n_bytes:
        raise ConfigError(FieldName(name), f" is {value}, must be positive: try {examples}")


def keywords_by_option(*kinds: type[Any]) -> dict[str, str]:
    """Return the keyword of each option on the command line, of several configurations."""
    return {
        option.long or "--" + name.replace("_", "-"): name
        for kind in kinds
        for name, option in options_of(kind).items()
    }


def options_of(kind: type[Any]) -> dict[str, Option]:
    """Return the options among the fields of a configuration, by name."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[Option] for field in fields if Option in field.metadata}
