"""Commands of a conversation: lines that begin with a slash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.cli.chat.conversation import ConversationError
from specdec.cli.options import OptionError
from specdec.cli.output import count_of, say, say_lines

if TYPE_CHECKING:
    from specdec.cli.chat.answers import Chat

_COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
_OFF = "off"


class Leave(Exception):
    """The user leaves the conversation."""


@dataclass(frozen=True)
class Command:
    """One command. argument: its shown name, if it takes one. act: gets the argument, or ""."""

    help: str
    act: Callable[[Chat, str], None]
    argument: str = ""


def run_command(chat: Chat, text: str) -> bool:
    """Run a message that is a command; return False for one that is none.

    A path such as /usr/bin is a message, and so is everything behind a space.

    Raises SpecdecError for an unknown command or a wrong argument, Leave.
    """
    match = _COMMAND.fullmatch(text)
    if match is None:
        return False
    name, argument = match[1], (match[2] or "").strip()
    name = _ALIASES.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        raise OptionError(
            f"there is no command /{name}: {hint}/help lists them (a space before the slash sends "
            "it)"
        )
    command = COMMANDS[name]
    if argument and not command.argument:
        raise OptionError(f"/{name} takes nothing after it: leave {argument[:20]!r} out")
    command.act(chat, argument)
    return True


def command_words() -> list[str]:
    """Return what a command begins with, for completion."""
    from specdec.cli.chat.settings import setting_names

    return [*(f"/{name}" for name in COMMANDS), *(f"/set {name}" for name in setting_names())]


def _help(_chat: Chat, _argument: str) -> None:
    width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
    usages = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    say_lines(f"  /{usage:{width}}  {text}" for usage, text in usages.items())
    say_lines(
        (
            'Enter sends. Alt-Enter, or a backslash before Enter, begins a new line; """ a block.',
            "Ctrl-C stops an answer, or clears what is typed. Ctrl-D leaves.",
        )
    )


def _clear(chat: Chat, _argument: str) -> None:
    chat.conversation.clear()
    say("the conversation is forgotten")


def _regenerate(chat: Chat, _argument: str) -> None:
    chat.conversation.drop_answer()
    if not chat.settings.values.get("temperature"):
        say("note: greedy decoding gives the same answer; /set temperature 0.8 varies it")
    chat.n_regenerated += 1
    chat.answer()


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == _OFF else argument
    shown = chat.conversation.system
    say("no system message" if shown is None else f"system message: {shown}")


def _set(chat: Chat, argument: str) -> None:
    if argument:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if not value.strip():
            raise OptionError(f"/set {name} has no value: give one, or off")
        chat.settings.set(name, value.strip())
    say_lines(chat.settings.lines())


def _save(chat: Chat, argument: str) -> None:
    path = _path(argument, "save")
    chat.conversation.save(path)
    say(f"saved {count_of(len(chat.conversation.turns), 'turn')} in {path}")


def _load(chat: Chat, argument: str) -> None:
    path = _path(argument, "load")
    chat.conversation.load(path)
    say(f"loaded {count_of(len(chat.conversation.turns), 'turn')} from {path}")


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise OptionError(f"/{name} needs a file: /{name} talk.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ConversationError(f"{argument}: {error}") from error


def _stats(chat: Chat, _argument: str) -> None:
    say_lines(chat.stats_lines())


def _exit(_chat: Chat, _argument: str) -> None:
    raise Leave


COMMANDS = {
    "help": Command("show these lines", _help),
    "clear": Command("forget the conversation; the system message stays", _clear),
    "regen": Command("answer the last message again", _regenerate),
    "system": Command("show or change the system message; off removes it", _system, "[TEXT]"),
    "set": Command("show or change sampling: /set temperature 0.8", _set, "[NAME VALUE]"),
    "save": Command("write the conversation to a file", _save, "FILE"),
    "load": Command("go on with a conversation from a file", _load, "FILE"),
    "stats": Command("show the context in use, and the speed so far", _stats),
    "exit": Command("leave", _exit),
}
_ALIASES = {"quit": "exit", "bye": "exit", "regenerate": "regen", "?": "help"}
