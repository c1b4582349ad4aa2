"""Errors of a configuration with the names of command line options instead of fields.

`memory_budget: 'lots' is not a byte count` names a Python field. A user of the command line reads
--memory-budget, and the name of the file if the value is the text of a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specdec.checks import ConfigError
from specdec.cli.options import OptionError
from specdec.option import options_of


def option_name(kind: type[Any], name: str) -> str:
    """Return the command line's name of a field of a configuration."""
    return options_of(kind)[name].long or "--" + name.replace("_", "-")


@contextmanager
def as_options(typed: Mapping[str, str]) -> Iterator[None]:
    """Turn the block's ConfigError into an OptionError. typed: the shown name of each field."""
    try:
        yield
    except ConfigError as error:
        raise OptionError(error.reported(typed)) from error
