"""Parser of the tokens of an output, in which marks are recognised by their ids.

A control token has no text. A mark that is a token of the vocabulary is therefore shown to the
text's parser as a single character of a private plane, and only there: the same letters, written
with ordinary tokens, are text.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from specdec.dialogue.channels import text_parser
from specdec.dialogue.deltas import Delta
from specdec.dialogue.formats import OutputFormat
from specdec.text.contract import TokenDecoder
from specdec.text.control_tokens import AddedToken
from specdec.text.detokenizer import IncrementalDetokenizer

_PLANE = 0x100000  # Unicode's last one: private use
_UNKNOWN = "\ufffd"
T = TypeVar("T")


class TokenMarks:
    """Marks of a format that are tokens of the vocabulary, and the format in their characters."""

    def __init__(self, form: OutputFormat, added: Mapping[str, AddedToken]) -> None:
        parts = (form.tools, form.thinking, form.channels)
        strings = {text for part in parts for text in _strings(part)}
        names = [name for name in added if name and any(name in text for text in strings)]
        self._chars = {name: chr(_PLANE + i) for i, name in enumerate(names)}
        self.by_id = {added[name].token_id: (name, self._chars[name]) for name in names}
        spellings = {
            ord(char): "" if added[name].is_control else name for name, char in self._chars.items()
        }
        self.form = replace(
            form,
            tools=self._translated(form.tools),
            thinking=self._translated(form.thinking),
            channels=self._translated(form.channels),
            token_names=spellings,
        )

    def _translated(self, value: T) -> T:
        """Return a format with characters in place of the tokens in its texts."""
        result: Any = value
        if isinstance(value, str):
            for name in sorted(self._chars, key=len, reverse=True):
                result = result.replace(name, self._chars[name])
        elif isinstance(value, tuple):
            result = tuple(self._translated(item) for item in value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {
                each.name: self._translated(getattr(value, each.name))
                for each in dataclasses.fields(value)
            }
            result = replace(value, **fields)
        return result


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _strings(item)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _strings(getattr(value, each.name))


class DialogueParser:
    """Incremental parser of one sequence's output.

    Args:
        form: the format, in texts.
        tokenizer: the model's.
        added: added tokens by their text.
        prompt_ids: the prompt, on whose end the text of the first tokens depends.
    """

    def __init__(
        self,
        form: OutputFormat,
        tokenizer: TokenDecoder,
        added: Mapping[str, AddedToken],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        marks = TokenMarks(form, added)
        self._marks = marks.by_id
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._parser = text_parser(marks.form)
        self._num_characters = 0
        self._pending = ""
        self._num_parsed = 0  # characters of the model's text that the parser has
        self._spliced: list[tuple[int, int, str]] = []
        self._shift = 0  # characters of the parser's text less those of the model's
        self._ends: list[int] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens pushed so far that belong to the reasoning, its tags included."""
        count = 0
        for start, end in self._parser.reasoning_spans:
            first = bisect_right(self._ends, start) if start else 0
            last = len(self._ends) if end is None else bisect_right(self._ends, end)
            count += max(last - first, 0)
        return count

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Delta]:
        """Add the text and the tokens of one step; return the deltas that are certain now.

        text may lag behind the tokens, and lacks those of control tokens.
        """
        for token_id in token_ids:
            self._add(int(token_id))
        self._pending += text
        return self._parser.push(self._ready(is_over=False))

    def _add(self, token_id: int) -> None:
        piece = self._detokenizer.push(token_id)
        self._num_characters += len(piece)
        name, char = self._marks.get(token_id, ("", ""))
        if char:
            n_shown = len(name) if piece.endswith(name) else 0
            self._spliced.append((self._num_characters - n_shown, n_shown, char))
            self._shift += 1 - n_shown
        self._ends.append(self._num_characters + self._shift)

    def _ready(self, *, is_over: bool) -> str:
        """Return the pending text with the characters of marks in it, up to one that is cut."""
        parts: list[str] = []
        while self._spliced:
            start, n_shown, char = self._spliced[0]
            n_before = start - self._num_parsed
            if len(self._pending) < n_before + n_shown:
                break  # later, or never: a stop string may have cut it off
            parts += [self._take(n_before), char]
            self._take(n_shown)
            del self._spliced[0]
        n_safe = len(self._pending)
        if self._spliced and not is_over:
            n_safe = min(n_safe, self._spliced[0][0] - self._num_parsed)
        parts.append(self._take(n_safe))
        return "".join(parts)

    def _take(self, n: int) -> str:
        text, self._pending = self._pending[:n], self._pending[n:]
        self._num_parsed += n
        for _, char in self._marks.values():
            text = text.replace(char, _UNKNOWN)
        return text

    def finish(self, reason: str) -> Sequence[Delta]:
        """Return the last deltas. reason: "stop" or "length", which may have cut a call off."""
        deltas = self._parser.push(self._ready(is_over=True))
        return [*deltas, *self._parser.finish(reason)]
