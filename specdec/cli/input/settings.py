"""Options from SPECDEC_* variables and from a settings file.

The command line takes precedence over a variable, a variable over the file, and a command's own
section of the file over the file's top level.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.cli.naming import PREFIX
from specdec.cli.options import OptionError
from specdec.opening import open_now
from specdec.run_options import AUTO

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_VARIABLE = f"{PREFIX}CONFIG"
# Options of one call, or read elsewhere: a key may come from a file instead of its variable.
_ELSEWHERE = frozenset({"help", "version", "debug", "config", "prompt", "file", "api_key"})


def name_variables(command: Any) -> None:
    """Give every option of every command its variable: --memory-budget SPECDEC_MEMORY_BUDGET."""
    for sub in command.commands.values():
        for name, option in options_by_name(sub):
            option.envvar = PREFIX + name.upper()
            option.show_envvar = False  # the rule is documented once


def read_defaults(path: Path, command: Any) -> dict[str, dict[str, Any]]:
    """Return the defaults that a settings file has for each command.

    Raises OptionError for an option that no command has.
    """
    values = read_toml(path)
    known = {name: dict(options_by_name(sub)) for name, sub in command.commands.items()}
    for_all = {key: item for key, item in values.items() if key not in known}
    every = {option for options in known.values() for option in options}
    _check(for_all, every, f"{path}: no command has")
    defaults = {}
    for name, options in known.items():
        own = values.get(name, {})
        if not isinstance(own, dict):
            raise OptionError(f"{path}: {name} is a command, write [{name}] for its options")
        _check(own, set(options), f"{path}: specdec {name} does not have")
        given = {field_name(key): item for key, item in {**for_all, **own}.items()}
        defaults[name] = {
            options[key].name: as_typed(item, options[key], f"{path}: {key}")
            for key, item in given.items()
            if key in options
        }
    return defaults


def read_toml(path: Path) -> dict[str, Any]:
    """Return the values of a TOML file. Raises OptionError."""
    try:
        with open_now(path) as file:
            return tomllib.loads(file.read().decode("utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path} cannot be read as TOML: {reason}") from error


def budget_reader(context: Any) -> Callable[[], str] | None:
    """Return a function that reads the memory budget of a running command from the settings file
    that --config names; None if it names none. It raises OptionError, also where the file's is not
    in effect."""
    file, name = context.find_root().params["config"], "memory_budget"
    if file is None:
        return None
    is_given = context.get_parameter_source(name).name in ("COMMANDLINE", "ENVIRONMENT")

    def read() -> str:
        if is_given:
            raise OptionError(f"--memory-budget was given, and takes precedence over {file}")
        defaults = read_defaults(file, context.find_root().command)[context.info_name]
        return str(defaults.get(name, AUTO))

    return read


def own_file() -> Path | None:
    """Return the user's settings file; None if there is none."""
    try:
        folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        file = Path(folder) / "specdec" / "config.toml"
        return file if file.is_file() else None
    except (OSError, RuntimeError):  # an unreadable home, or a user without one
        return None


def options_by_name(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of a command that may come from elsewhere, by their long names."""
    for param in command.params:
        names = [field_name(text[2:]) for text in param.opts if text.startswith("--")]
        if names and not _ELSEWHERE.intersection((param.name, *names)):
            yield names[0], param


def field_name(name: str) -> str:
    return name.replace("-", "_")


def _check(values: Mapping[str, Any], known: set[str], problem: str) -> None:
    for key, value in values.items():
        if field_name(key) not in known:
            raise OptionError(f"{problem} an option --{key.replace('_', '-')}")
        if isinstance(value, dict):
            raise OptionError(f"{problem} a section [{key}]")


def as_typed(value: Any, option: Any, whose: str) -> Any:
    """Return a value as it would be typed on the command line, where it is converted.

    Raises OptionError for a list if the option takes one value.
    """
    if option.multiple:
        return [_word(item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        raise OptionError(f"{whose} is a list, but takes one value")
    return value if option.is_flag and isinstance(value, bool) else _word(value)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
