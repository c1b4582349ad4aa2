"""What a field of a configuration is to those who set it.

An option of loading or of sampling is one field of a frozen dataclass, and all about it is written
there: the command line makes its options of the fields, the configuration checks itself by them,
and tests hold the documentation and the types of `specdec.load` against them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import MISSING, dataclass
from typing import Any

from specdec.checks import ConfigError, FieldName, check

# Panels of the help, in their order.
MODELS, MEMORY, SPECULATION, SAMPLING = "Models", "Memory", "Speculation", "Sampling"
BEAMS = "Beams and sequences"
SERVER, LIMITS = "Server", "Limits"


@dataclass(frozen=True)
class Option:
    """One option. The field has its name, type and default."""

    help: str
    panel: str = ""
    """Of the help in which the command line shows it; without one it is of the Python API only."""
    short: str = ""
    long: str = ""
    """On the command line, where that is not the field's name."""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    """With a limit the value is a number, an integer where the limit is one."""
    above: float | None = None
    """Instead of `at_least`, where the limit itself is too low."""
    at_most: float = math.inf
    shown_default: str | bool = True
    """What the default means, where its value does not say it; False: nothing is shown."""

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that is none of the choices, no number, or out of range.

        None stands for what is chosen later, and passes.
        """
        if self.choices and value is not None and value not in self.choices:
            known = ", ".join(self.choices)
            raise ConfigError(FieldName(name), f" is {value!r}, must be one of {known}")
        low = self.at_least if self.above is None else self.above
        if low is not None:
            check(name, value, type(low), low, self.at_most, open_low=self.above is not None)


def option(default: Any, help: str, panel: str = "", **more: Any) -> Any:
    """A field of a configuration, its default MISSING where it must be given."""
    return dataclasses.field(default=default, metadata={Option: Option(help, panel, **more)})


def required(help: str, panel: str = "", **more: Any) -> Any:
    return option(MISSING, help, panel, **more)


def taken_from(kind: type[Any], name: str) -> Any:
    """A field like that of another configuration: its default and all that is written there."""
    (field,) = (item for item in dataclasses.fields(kind) if item.name == name)
    return dataclasses.field(default=field.default, metadata=field.metadata)


def check_options(configuration: Any) -> None:
    """Raise ConfigError for the first field whose value its option refuses.

    None is one only where it is the default: what is chosen later.
    """
    for field in dataclasses.fields(configuration):
        reported, value = field.metadata.get(Option), getattr(configuration, field.name)
        if reported is None:
            continue
        if value is None and field.default not in (None, MISSING):
            raise ConfigError(
                FieldName(field.name), f" is None: leave it out for {field.default!r}"
            )
        reported.check(field.name, value)


def options_of(kind: type[Any]) -> dict[str, Option]:
    """The options among the fields of a configuration."""
    fields = dataclasses.fields(kind)
    return {field.name: field.metadata[Option] for field in fields if Option in field.metadata}
