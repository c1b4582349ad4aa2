"""Errors of a configuration in the words of the command line: fields under their options' names.

A field is called as it is in Python: `memory_budget: 'lots' is not a byte count`. Who typed
--memory-budget reads that, and who gave a text in a file reads which file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specdec.checks import ConfigError
from specdec.cli.options import OptionError
from specdec.option import options_of


def option_name(kind: type[Any], name: str) -> str:
    """What the command line calls a field of a configuration."""
    return options_of(kind)[name].long or "--" + name.replace("_", "-")


@contextmanager
def as_options(typed: Mapping[str, str]) -> Iterator[None]:
    """Turn the block's ConfigError into an OptionError. typed: what stands for each field."""
    try:
        yield
    except ConfigError as error:
        raise OptionError(error.reported(typed)) from error
