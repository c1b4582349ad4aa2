"""What a field of a configuration is to those who set it.

An option of loading or of sampling is one field of a frozen dataclass, and all about it is written
there: the command line makes its options of the fields, the configuration checks itself by them,
and tests hold the documentation and the types of `specdec.load` against them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, dataclass
from typing import Any

from specdec.checks import ConfigError

# Panels of the help, in their order.
MODELS, MEMORY, SPECULATION, SAMPLING = "Models", "Memory", "Speculation", "Sampling"
BEAMS = "Beams and sequences"


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
    at_least: int | None = None
    at_most: int | None = None
    shown_default: str | bool = True
    """What the default means, where its value does not say it; False: nothing is shown."""

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError for a value that is none of the choices, or out of range."""
        if self.choices and value is not None and value not in self.choices:
            raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(self.choices)}")
        if self.at_least is not None and value is not None and value < self.at_least:
            raise ConfigError(f"{name} is {value}, must be at least {self.at_least}")
        if self.at_most is not None and value is not None and value > self.at_most:
            raise ConfigError(f"{name} is {value}, must be at most {self.at_most}")


def option(default: Any, help: str, panel: str = "", **more: Any) -> Any:
    """A field of a configuration, its default MISSING where it must be given."""
    return dataclasses.field(default=default, metadata={Option: Option(help, panel, **more)})


def required(help: str, panel: str = "", **more: Any) -> Any:
    return option(MISSING, help, panel, **more)


def options_of(kind: type[Any]) -> dict[str, Option]:
    """The options among the fields of a configuration."""
    fields = dataclasses.fields(kind)
    return {one.name: one.metadata[Option] for one in fields if Option in one.metadata}
