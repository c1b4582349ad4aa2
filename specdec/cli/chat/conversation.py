"""Conversation: the messages so far, and which of them are forgotten when the context is full."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offload.errors import SpecdecError
from specdec.cli.input.prompts import read_text, system_turn
from specdec.cli.options import OptionError

Message = dict[str, str]
CountTokens = Callable[[Sequence[Message]], int]


class ConversationError(SpecdecError):
    """A conversation cannot be saved, loaded or continued."""


class Conversation:
    """Messages of a chat: a system message, if there is one, then turns.

    A turn is a user's message and the answer to it.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.turns: list[list[Message]] = []

    @property
    def messages(self) -> list[Message]:
        return self._with_system(self.turns)

    def _with_system(self, turns: Sequence[Sequence[Message]]) -> list[Message]:
        return [*system_turn(self.system), *(item for turn in turns for item in turn)]

    def ask(self, text: str) -> None:
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        """Append the answer to the last question."""
        self.turns[-1].append({"role": "assistant", "content": text})

    def drop_question(self) -> None:
        """Drop a question that got no answer."""
        if self.turns and len(self.turns[-1]) == 1:
            self.turns.pop()

    def drop_answer(self) -> None:
        """Drop the last answer. Raises ConversationError."""
        if not self.turns:
            raise ConversationError("there is no answer yet: ask something first")
        del self.turns[-1][1:]

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()

    def fit(self, max_context: int, max_tokens: int, count: CountTokens) -> int:
        """Drop the oldest turns of a full context; return how many.

        The context is full where the prompt leaves neither `max_tokens` nor a quarter of it for the
        answer. Then turns are dropped until the prompt takes at most half, as llama.cpp does: what
        follows a dropped turn has to be computed again, which should not be at every question. The
        last turn stays, and where it is too long by itself, so do the others.

        Args:
            max_context: tokens of prompt and answer.
            count: number of tokens of a conversation's prompt.
        """
        reserve = min(max_tokens, max_context // 4)
        if count(self.messages) + reserve < max_context:
            return 0
        if count(self._with_system(self.turns[-1:])) >= max_context:
            return 0  # the last turn alone is too long, which will be said
        n_dropped = 0
        while len(self.turns) > 1 and count(self.messages) > max_context // 2:
            del self.turns[0]
            n_dropped += 1
        return n_dropped

    def save(self, path: Path) -> None:
        """Write the messages as JSON; overwrite a conversation only. Raises ConversationError."""
        if path.exists():
            try:
                _read(path)
            except SpecdecError:
                raise ConversationError(
                    f"{path} exists and is no conversation: name another file"
                ) from None
        try:
            path.write_text(json.dumps({"messages": self.messages}, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise ConversationError(f"{path} cannot be written: {error.strerror}") from error

    def load(self, path: Path) -> None:
        """Take the messages of a file in place of these. Raises ConversationError."""
        messages = _read(path)
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        rest = messages[1:] if has_system else messages
        self.turns = [list(turn) for turn in zip(rest[::2], rest[1::2], strict=True)]


def _read(path: Path) -> list[Message]:
    """Return the messages of a saved conversation: a system message or none, then whole turns."""
    try:
        value: Any = json.loads(read_text(path))
        messages = [{"role": m["role"], "content": m["content"]} for m in value["messages"]]
    except OSError as error:
        raise ConversationError(f"{path} cannot be read: {error.strerror}") from error
    except OptionError as error:  # no text
        raise ConversationError(str(error)) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConversationError(f"{path} is no conversation that /save wrote") from error
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2) or not all(
        isinstance(message["content"], str) for message in messages
    ):
        raise ConversationError(f"{path} is no conversation that /save wrote")
    return messages
