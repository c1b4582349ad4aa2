"""The one base class of every error that a user may see.

The command line prints such an error as one line and exits with status 2; anything else is a bug
and keeps its traceback. Subclasses live beside the code that raises them.

Messages are written with the command line's options ("raise --ctx-size"). In a program that uses
the package they name the keyword instead ("raise ctx_size"), which is what it can change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_NUMBER = r"\d[\w.]*(?: ?[KMGT]i?B\b)?"
_WORDS = ("cpu", "cuda", "mmap", "draft,ngram", "ngram", "bf16", "f16", "q8_0", "q4_0")
_OPTION = re.compile(rf"(?<![\w-])(--[a-z]+(?:-[a-z]+)*)(?: ({_NUMBER})| ({'|'.join(_WORDS)})\b)?")


class _Names:
    """Names that messages show: a process has one interface to its user."""

    def __init__(self) -> None:
        self.keywords: Mapping[str, str] = {}
        self.num_commands = 0


_NAMES = _Names()


def set_keywords(keywords: Mapping[str, str]) -> None:
    """Set the keyword of each option (`--ctx-size`: `ctx_size`)."""
    _NAMES.keywords = keywords


@contextmanager
def naming_options() -> Iterator[None]:
    """Leave options in messages as they are within the block, which is a command's work."""
    _NAMES.num_commands += 1
    try:
        yield
    finally:
        _NAMES.num_commands -= 1


def with_names(message: str) -> str:
    """Return a message with the names that its reader knows."""
    if _NAMES.num_commands or "--" not in message:
        return message
    return _OPTION.sub(_with_keyword, message)


def _with_keyword(match: re.Match[str]) -> str:
    option, number, word = match.groups()
    keyword = _NAMES.keywords.get(option)
    if keyword is None:
        return match[0]
    if word is not None:
        return f"{keyword}={word!r}"
    if number is None:
        return keyword
    return f"{keyword}={number}" if number.isdigit() else f"{keyword}={number!r}"


class SpecdecError(Exception):
    """An error that a user may see: what is wrong, the figure, and the remedy, in one line."""

    def __str__(self) -> str:
        return with_names(super().__str__())
