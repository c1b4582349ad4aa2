"""The file of `specdec serve --preset`: a section of options for each model.

A settings file in which a section is a model instead of a command. Options of the command line and
of variables take precedence over a section, a section over the file's top level, and that over the
settings file. --memory-budget is the exception: outside of sections it is of all models together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from typer.exceptions import TyperException

from specdec.cli.groups import CHAT, as_given
from specdec.cli.input.settings import as_typed, field_name, options_by_name, read_toml
from specdec.cli.naming import as_options
from specdec.cli.options import OptionError
from specdec.run_options import AUTO, RunOptions
from specdec.serve.router.keep_alive import EXAMPLES, parse_keep_alive

_OF_SECTIONS = ("model", "alias", "load_on_startup")
_TYPED = ("COMMANDLINE", "ENVIRONMENT")


@dataclass(frozen=True)
class PresetModel:
    """One section. load: its memory budget is AUTO unless the model has one of its own."""

    names: tuple[str, ...]
    load: RunOptions
    keep_alive: float
    on_startup: bool


@dataclass(frozen=True)
class Preset:
    """A file. memory_budget: of all models together."""

    models: tuple[PresetModel, ...]
    memory_budget: str | int


def read_preset(path: Path, context: Any, keep_alive: float) -> Preset:
    """Return what a file says. context: of the command. keep_alive: the server's, in seconds.

    Raises OptionError, which names the section.
    """
    values = read_toml(path)
    sections = {name: item for name, item in values.items() if isinstance(item, dict)}
    common = {field_name(name): item for name, item in values.items() if name not in sections}
    if not sections:
        raise OptionError(f"{path} has no model: write a section for each, such as [NAME]")
    reader = _Reader(path, context, keep_alive)
    reader.check(common, str(path))
    models = tuple(reader.model(name, item, common) for name, item in sections.items())
    _check_names(path, models)
    return Preset(models, reader.shared_budget(common))


def _check_names(path: Path, models: tuple[PresetModel, ...]) -> None:
    names: set[str] = set()
    for model in models:
        for name in model.names:
            if name in names:
                raise OptionError(f"{path}: two models have the name {name}")
            names.add(name)


class _Reader:
    def __init__(self, path: Path, context: Any, keep_alive: float) -> None:
        self._path, self._context, self._keep_alive = path, context, keep_alive
        self._options = {option.name: option for _, option in options_by_name(context.command)}
        self._known = {*CHAT, "keep_alive"}

    def shared_budget(self, common: Mapping[str, Any]) -> str | int:
        """Return the budget of all models together."""
        if self._is_typed("memory_budget") or "memory_budget" not in common:
            return str(self._context.params["memory_budget"])
        return str(self._value("memory_budget", common["memory_budget"], str(self._path)))

    def model(self, name: str, values: Mapping[str, Any], common: Mapping[str, Any]) -> PresetModel:
        where = f"{self._path}: [{name}]"
        own = {field_name(key): value for key, value in values.items()}
        self.check(own, where, *_OF_SECTIONS)
        shared = {key: value for key, value in common.items() if key != "memory_budget"}
        given = {**shared, "model": name, **own}
        options = {field: self._option(field, given, where) for field in CHAT}
        if "memory_budget" not in own:
            options["memory_budget"] = AUTO
        shown = {field: f"{where} {field.replace('_', '-')}" for field in CHAT}
        with as_options(shown):
            load = as_given(options)
        aliases = str(own.get("alias", "")).split(",")
        names = (name, *(item.strip() for item in aliases if item.strip()))
        on_startup = own.get("load_on_startup", False)
        if not isinstance(on_startup, bool):
            raise OptionError(f"{where} load-on-startup is {on_startup!r}, must be true or false")
        return PresetModel(names, load, self._time(given, where), on_startup)

    def check(self, values: Mapping[str, Any], where: str, *more: str) -> None:
        known = {*self._known, *more}
        for key, value in values.items():
            if isinstance(value, dict):
                raise OptionError(f"{where} has a section in it: put a name with dots in quotes")
            if key not in known or (key == "model" and not more):
                near = get_close_matches(key, known, 1)
                hint = f": did you mean {near[0].replace('_', '-')}?" if near else ""
                raise OptionError(f"{where} has no option {key.replace('_', '-')}{hint}")

    def _option(self, field: str, given: Mapping[str, Any], where: str) -> Any:
        is_own = field in ("model", "memory_budget")
        if field not in given or (self._is_typed(field) and not is_own):
            value = self._context.params[field]
            return None if value == () else value  # an option that may be repeated
        return self._value(field, given[field], where)

    def _value(self, field: str, value: Any, where: str) -> Any:
        """Return a value as the command's option takes it."""
        option = self._options[field]
        try:
            typed = as_typed(value, option, f"{where} {field.replace('_', '-')}")
            return option.process_value(self._context, typed)
        except TyperException as error:
            raise OptionError(f"{where}: {error.format_message().rstrip('.')}") from error

    def _time(self, given: Mapping[str, Any], where: str) -> float:
        if "keep_alive" not in given or self._is_typed("keep_alive"):
            return self._keep_alive
        try:
            return parse_keep_alive(given["keep_alive"])
        except ValueError as error:
            value = given["keep_alive"]
            raise OptionError(f"{where} keep-alive is {value!r}, must be {EXAMPLES}") from error

    def _is_typed(self, field: str) -> bool:
        source = self._context.get_parameter_source(field)
        return source is not None and source.name in _TYPED
