"""Readers of a user's messages: an editor in a terminal, lines of a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload.process.home import NoHome, home_folder
from specdec.cli.output import say

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT, CONTINUATION = "> ", ". "
_BLOCK = '"""'


class MessageReader(Protocol):
    def read(self) -> str | None:
        """Return the user's next message, not blank; None at the end of input.

        Raises KeyboardInterrupt.
        """


def message_reader(words: Sequence[str]) -> MessageReader:
    """Return the reader for this process's stdin. words: completions of a message's beginning."""
    return Editor(words) if is_interactive() else LineReader()


def is_interactive() -> bool:
    """Return whether a user types, and sees the answers, in a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


class LineReader:
    """One message per line."""

    def read(self) -> str | None:
        while line := sys.stdin.readline():
            if line.strip():
                return line.rstrip()
        return None


class Editor:
    """Line editing with history; a pasted text is one message.

    Enter sends. Alt-Enter begins a new line, and so does Enter after a backslash or within a block
    that three double quotes begin. Ctrl-C clears what was typed; on an empty line it prints how to
    leave, and leaves when it is pressed again.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._session = _session(words)

    def read(self) -> str | None:
        has_asked = False
        while True:
            try:
                text = self._session.prompt()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if has_asked:
                    raise
                has_asked = True
                say("Ctrl-C again or Ctrl-D leaves")
                continue
            has_asked = False
            if text.strip():
                return unquoted(text)


def is_open(text: str) -> bool:
    """Return whether Enter continues a message instead of sending it."""
    if text.startswith(_BLOCK):
        return not (text.endswith(_BLOCK) and len(text) >= 2 * len(_BLOCK))
    return text.endswith("\\")


def unquoted(text: str) -> str:
    """Return a message without the marks that continued its lines."""
    if text.startswith(_BLOCK):
        return text.removeprefix(_BLOCK).removesuffix(_BLOCK).strip("\n")
    return text.replace("\\\n", "\n").rstrip()


def _session(words: Sequence[str]) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition

    def is_command() -> bool:
        return session.default_buffer.text.startswith("/")

    session: PromptSession[str] = PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        key_bindings=_keys(words),
        history=_history(),
        completer=WordCompleter(list(words), sentence=True),
        complete_while_typing=Condition(is_command),
    )
    return session


def _keys(words: Sequence[str]) -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab")
    def complete(event: KeyPressEvent) -> None:
        """Complete the only word at once: the menu of several ones may not be there yet."""
        buffer = event.current_buffer
        typed = buffer.document.text_before_cursor
        matches = [word for word in words if word.startswith(typed)]
        if typed and len(matches) == 1:
            buffer.cancel_completion()
            buffer.insert_text(matches[0][len(typed) :])
        elif buffer.complete_state:
            buffer.complete_next()
        else:
            buffer.start_completion(insert_common_part=True)

    @keys.add("c-c")
    @keys.add("<sigint>")
    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys


def _history() -> History:
    """Return the history of earlier conversations too, where its file can be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # messages are the user's alone
    except (OSError, NoHome):
        return InMemoryHistory()
    return FileHistory(path)


def history_file() -> Path:
    """Return $XDG_STATE_HOME/specdec/chat-history, by default below ~/.local/state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if os.path.isabs(base) else home_folder() / ".local" / "state"
    return folder / "specdec" / "chat-history"
