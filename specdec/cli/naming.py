"""Errors of a configuration with the names of command line options instead of fields.

`memory_budget: 'lots' is not a byte count` names a Python field. A user of the command line reads
--memory-budget, and the name of the file if the value is the text of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError
from specdec.checks import ConfigError
from specdec.cli.options import OptionError
from specdec.option import options_of

DEFAULTS_FILE = "specdec.defaults"
"""Key in a context's `meta`: the file that its default values come from."""


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
def naming_origins(context: Any) -> Iterator[None]:
    """Name, in the block's errors, the variable or the settings file that an option's value comes
    from, if the error names the option or its value."""
    try:
        yield
    except (SpecdecError, OSError) as error:
        for item in context.command.params:
            message = _with_origin(error, context, item)
            if message is not None:
                raise OptionError(message) from error
        raise


def _with_origin(error: Exception, context: Any, item: Any) -> str | None:
    """Return the message with the origin of one option's value; None if it is about another."""
    origin = _origin_of(context, item.name)
    if origin is None or origin in str(error):
        return None
    option, value = max(item.opts, key=len), context.params.get(item.name)
    if isinstance(error, OSError):
        is_named = bool(error.filename) and str(value) == str(error.filename)
        return f"{origin}: {error.filename}: {error.strerror}" if is_named else None
    message = str(error)
    if message.startswith(f"{option} ") and origin == item.envvar:
        return f"{origin}{message.removeprefix(option)}"
    values = value if isinstance(value, (list, tuple)) else [value]
    if any(_is_in(text, message) for text in (option, *map(_as_word, values))):
        return f"{message} ({option} is set by {origin})"
    return None


def _origin_of(context: Any, name: str) -> str | None:
    source = context.get_parameter_source(name)
    if source is not None and source.name == "DEFAULT_MAP":
        return str(context.meta[DEFAULTS_FILE])
    return variable_of(context, name)


def _as_word(value: Any) -> str:
    """Return the text of a value that a message can be searched for; "" for numbers and flags."""
    return str(value) if isinstance(value, (str, Path)) and len(str(value)) > 1 else ""


def _is_in(word: str, message: str) -> bool:
    return bool(word) and bool(re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", message))
