"""`/set`: sampling options of a conversation, changed while it goes on."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from specdec.cli.input.prompts import read_text
from specdec.cli.naming import as_options, option_name
from specdec.cli.options import OptionError
from specdec.option import SAMPLING, options_of
from specdec.sampling.params import UNLIMITED_TOKENS, SamplingParams

_OFF = ("off", "default")
_FILES = ("json_schema", "grammar")


def _fields() -> dict[str, str]:
    """Return the fields that `/set` changes, by their shown names."""
    names = [name for name, item in options_of(SamplingParams).items() if item.panel == SAMPLING]
    return {_shown(name): name for name in ("max_tokens", *names)}


def setting_names() -> list[str]:
    """Return the names that `/set` takes: max-tokens, and the sampling options."""
    return list(_fields())


class Settings:
    """Keywords of `LLM.stream`; `initial` is what the command line gave."""

    def __init__(self, initial: dict[str, Any]) -> None:
        self._initial = dict(initial)
        self.values = dict(initial)

    def lines(self) -> list[str]:
        """Return `name value` of everything that is set."""
        values = {**self.values}
        if values["max_tokens"] == UNLIMITED_TOKENS:
            values["max_tokens"] = -1  # as it was given
        return [f"{_shown(name)} {value}" for name, value in values.items()]

    def set(self, name: str, text: str) -> None:
        """Set one option from its text; "off" takes it back. Raises OptionError."""
        known = _fields()
        field = known.get(name.removeprefix("--").replace("_", "-"))
        if field is None:
            near = [key for key in known if key.startswith(name)] or get_close_matches(name, known)
            hint = f"did you mean {near[0]}? It" if near else "it"
            raise OptionError(f"/set has no {name}: {hint} takes {', '.join(known)}")
        values = dict(self.values)
        values.pop(field, None)
        if text.lower() not in _OFF:
            values[field] = _parsed(field, text)
        elif field in self._initial:
            values[field] = self._initial[field]
        with as_options({key: f"/set {_shown(key)}" for key in values}):
            SamplingParams(**values)
        self.values = values


def _shown(field: str) -> str:
    name = "--max-tokens" if field == "max_tokens" else option_name(SamplingParams, field)
    return name.removeprefix("--")


def _parsed(field: str, text: str) -> Any:
    if field == "stop":
        return (text.replace("\\n", "\n"),)
    if field in _FILES:
        return _text_of(Path(text))
    hint = get_type_hints(SamplingParams)[field]
    kind = next((item for item in get_args(hint) or (hint,) if item is not type(None)), str)
    if kind not in (int, float):
        return text
    try:
        value = kind(text)
        return UNLIMITED_TOKENS if field == "max_tokens" and value == -1 else value
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise OptionError(f"/set {_shown(field)} is {text!r}, must be {noun}, or off") from None


def _text_of(path: Path) -> str:
    try:
        return read_text(path.expanduser())
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path}: {reason}") from error
