"""Words of a command line as the commands declare them: other programs' names of options are
replaced, and a model may be named without -m."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.cli.enforce import enforced_bytes
from specdec.cli.options import OptionError
from specdec.cli.other_names import (
    NONE,
    ON_SERVERS,
    REFUSED,
    RENAMED,
    REPLACED,
    SKIPPED,
    SWITCH,
    Refused,
    Skipped,
)
from specdec.cli.output import say

_SWITCHES = ("on", "off", "auto", "0", "1", "true", "false")


def understood(argv: Sequence[str], command: Any) -> list[str]:
    """Return the arguments in our names, up to a bare `--`; print notes on skipped options.

    Args:
        command: typer's command, or group of commands.

    Raises OptionError for options of other programs that are refused.
    """
    own = getattr(command, "commands", None)
    if own is None:
        return _Words(argv, command).expanded()
    at = next((i for i, word in enumerate(argv) if word in own), len(argv))
    if at == len(argv) or own[argv[at]].context_settings.get("ignore_unknown_options"):
        return list(argv)
    return [*argv[: at + 1], *_Words(argv[at + 1 :], own[argv[at]]).expanded()]


class _Words:
    """The words behind a command's name."""

    def __init__(self, words: Sequence[str], command: Any) -> None:
        self._rest = list(words)
        self._result: list[str] = []
        self._positions: list[int] = []
        self._typed: set[str] = set()
        params = [item for item in command.params if item.param_type_name == "option"]
        self._options = {
            name: item for item in params for name in (*item.opts, *item.secondary_opts)
        }
        self._has_arguments = len(params) < len(command.params)

    def expanded(self) -> list[str]:
        while self._rest:
            word = self._rest.pop(0)
            if word == "--":
                self._result += [word, *self._rest]
                break
            if len(word) > 1 and word.startswith("-"):
                self._take_option(word)
            else:
                self._positions.append(len(self._result))
                self._result.append(word)
        if not self._has_arguments:
            self._name_positions()
        return self._result

    def _take_option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        if name not in self._options:
            name, equals, value = self._renamed(name, equals, value)
        option = self._options.get(name)
        if option is None:
            self._take_other(word)
            return
        self._typed.add(option.name)
        self._result.append(name + equals + value)
        if not equals and not option.is_flag and self._rest:
            self._result.append(self._rest.pop(0))

    def _renamed(self, name: str, equals: str, value: str) -> tuple[str, str, str]:
        for names in (RENAMED, ON_SERVERS):
            if names.get(name) in self._options:
                return names[name], equals, value
        flag = REPLACED.get(name, "").partition("=")
        return flag if flag[0] in self._options else (name, equals, value)

    def _take_other(self, word: str) -> None:
        """Take an option that no command has: skip or refuse it, or leave it for typer's error."""
        name, equals, _ = word.partition("=")
        item = SKIPPED.get(name) or REFUSED.get(name)
        if item is None:
            self._result.append(word)
            return
        words = [word]
        if not equals and self._rest and self._has_value(item):
            words.append(self._rest.pop(0))
        if isinstance(item, Refused):
            raise OptionError(f"{' '.join(words)}: {item.remedy}")
        if enforced_bytes() is None:  # else the process outside has said so
            say(f"note: {' '.join(words)} has no effect: {item.reason}")

    def _has_value(self, item: Skipped | Refused) -> bool:
        is_switch = self._rest[0] in _SWITCHES
        return is_switch if item.value == SWITCH else item.value != NONE

    def _name_positions(self) -> None:
        """Put -m before a model that is named without it, and -p before a prompt behind it."""
        free = [
            flag
            for flag, names in (("-m", {"model"}), ("-p", {"prompt", "file"}))
            if flag in self._options and not names & self._typed
        ]
        for position, flag in reversed(list(zip(self._positions, free, strict=False))):
            self._result.insert(position, flag)
