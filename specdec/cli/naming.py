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


def variable_of(context: Any, name: str) -> str | None:
    """Return the environment variable that a parameter's value comes from, if it does."""
    source = context.get_parameter_source(name)
    if source is None or source.name != "ENVIRONMENT":
        return None
    return next((str(item.envvar) for item in context.command.params if item.name == name), None)


def with_variables(context: Any, typed: Mapping[str, str]) -> dict[str, str]:
    """Return the shown names with the variable in place of an option that is set by one."""
    return {name: variable_of(context, name) or shown for name, shown in typed.items()}


@contextmanager
def naming_variables(context: Any) -> Iterator[None]:
    """Name the variable, too, in the block's errors about the text of one option."""
    try:
        yield
    except OptionError as error:
        for item in context.command.params:
            variable, option = variable_of(context, item.name), max(item.opts, key=len)
            if variable is not None and str(error).startswith(f"{option} "):
                raise OptionError(f"{variable}{str(error).removeprefix(option)}") from error
        raise
    except OSError as error:
        for item in context.command.params:
            variable, value = variable_of(context, item.name), context.params.get(item.name)
            if variable is not None and error.filename and str(value) == str(error.filename):
                raise OptionError(f"{variable}: {error.filename}: {error.strerror}") from error
        raise
