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
from specdec.cli.output import OutputError
from specdec.option import options_of

PREFIX = "SPECDEC_"
"""Beginning of the environment variables that set options."""
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
    except OSError as error:
        for origin, _, values in _from_elsewhere(context):
            if error.filename and str(error.filename) in values:
                raise OptionError(f"{origin}: {error.filename}: {error.strerror}") from error
        raise
    except OutputError:
        raise  # of what was written, whatever the options
    except SpecdecError as error:
        message = _with_origin(str(error), context)
        if message is None:
            raise
        raise OptionError(message) from error


def _with_origin(message: str, context: Any) -> str | None:
    """Return the message with the origin of the value that it is about, which it names first; None
    for one about no such value, and for one that has it already."""
    places = []
    for origin, option, values in _from_elsewhere(context):
        if origin in message:
            return None
        if message.startswith(f"{option} ") and origin.startswith(PREFIX):
            return f"{origin}{message.removeprefix(option)}"
        starts = (_place(text, message) for text in (option, *values))
        places += [(start, option, origin) for start in starts if start >= 0]
    if not places:
        return None
    _, option, origin = min(places)
    return f"{message} ({option} is set by {origin})"


def _from_elsewhere(context: Any) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (origin, option, texts of its values) of the options that were not typed."""
    for item in context.command.params:
        origin = _origin_of(context, item.name)
        if origin is not None:
            value = context.params.get(item.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            # Valid words such as on or ram are in messages about other things, too.
            choices = (getattr(item, "metavar", None) or "").split("|")
            words = [str(x) for x in values if isinstance(x, (str, Path))]
            words = [word for word in words if len(word) > 1 and word not in choices]
            yield origin, max(item.opts, key=len), words


def _origin_of(context: Any, name: str) -> str | None:
    source = context.get_parameter_source(name)
    if source is not None and source.name == "DEFAULT_MAP":
        return str(context.meta[DEFAULTS_FILE])
    return variable_of(context, name)


def _place(word: str, message: str) -> int:
    """Return where a message has a word; -1 if nowhere."""
    match = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", message)
    return match.start() if match else -1
