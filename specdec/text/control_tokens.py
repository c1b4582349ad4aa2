"""Protection against control tokens written out in messages: there they are ordinary text.

Otherwise a client that writes `<|im_end|>` into a message forges a turn. Templates transform their
input (trim, split, write it as JSON), so the origin of a part of the rendered text is unknown
afterwards, unless it is marked before: private-use characters are put on both sides of every
control token's text in the messages, and removed again when the text is cut into pieces.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

_LONGEST_PART = 64  # characters of a control token that may be split between two texts
_MARKS = range(0xE000, 0xF900)  # private use; JSON and repr write them as \ue000


class NoMarkLeft(ValueError):
    """The messages contain every character that could mark a place in them."""

    def __init__(self) -> None:
        super().__init__(
            f"the messages hold all {len(_MARKS)} private-use characters: leave one of them out"
        )


@dataclass(frozen=True)
class AddedToken:
    """A token that is matched literally in a text, before all others.

    is_control: it has no text and only templates write it, such as an end of turn.
    strips_left, strips_right: whitespace beside it belongs to it.
    """

    token_id: int
    is_control: bool
    strips_left: bool = False
    strips_right: bool = False


def with_one_bos(
    ids: list[int], bos: int | None, encode_bare: Callable[[], list[int]]
) -> list[int]:
    """Return the ids of a text without the BOS token that was added before one written in the text.

    encode_bare: function that encodes the text alone.
    """
    if bos is None or ids[:2] != [bos, bos]:
        return ids
    bare = encode_bare()
    return ids[1:] if bare[:1] == [bos] and ids[1 : 1 + len(bare)] == bare else ids


class TextPiece(NamedTuple):
    """A part of a rendered conversation.

    parse_special: whether control tokens written out in it are parsed as such.
    """

    text: str
    parse_special: bool


class MarkedContents:
    """Messages (and tools) with marks beside the control tokens in their texts.

    Args:
        added: the tokenizer's added tokens by their text.
        given: any JSON value. All strings in it, keys included, are contents.
        template: the template that will render it.

    Attributes:
        value: `given` for the template.

    Raises NoMarkLeft.
    """

    def __init__(self, added: Mapping[str, AddedToken], given: Any, template: str = "") -> None:
        self._added = added
        self._control_texts = _ControlTexts.of(
            tuple(text for text, token in added.items() if token.is_control)
        )
        self._marks: tuple[str, str] | None = None
        self.value = given
        if any(self._control_texts.are_touched_by(text) for text in _strings_in(given)):
            self._marks = _unused_characters([given, template])
            self.value = self._marked(given, *self._marks)

    def _marked(self, value: Any, *marks: str) -> Any:
        if isinstance(value, str):
            return self._control_texts.marked(value, *marks)
        if isinstance(value, Mapping):
            items = value.items()
            return {self._marked(key, *marks): self._marked(item, *marks) for key, item in items}
        if isinstance(value, (list, tuple)):
            return [self._marked(item, *marks) for item in value]
        return value

    def pieces(self, rendered: str) -> list[TextPiece]:
        """Cut a text that a template rendered from `value` into pieces to tokenize one by one.

        Pieces are cut at the template's own control tokens only, where tokenizers split texts too:
        the joined tokens of the pieces are those of the whole text.
        """
        if self._marks is None:
            return [TextPiece(rendered, True)]
        for mark in self._marks:
            rendered = rendered.replace(json.dumps(mark)[1:-1], mark)
        pieces: list[TextPiece] = []
        before: AddedToken | None = None
        begin = end_before = 0
        for start, end, token in self._own_tokens(rendered, *self._marks):
            gap = rendered[end_before:start]
            content = gap.translate({ord(mark): None for mark in self._marks})
            if content != gap:
                pieces.append(TextPiece(rendered[begin:end_before], True))
                pieces.append(TextPiece(_stripped(content, before, token), False))
                begin = start
            end_before, before = end, token
        pieces.append(TextPiece(rendered[begin:], True))
        return [piece for piece in pieces if piece.text]

    def _own_tokens(
        self, rendered: str, opening: str, closing: str
    ) -> Iterator[tuple[int, int, AddedToken | None]]:
        """Yield (start, end, token) of the template's control tokens, and of the text's end."""
        for start, end in self._control_texts.spans(rendered):
            # One mark is enough: a template that cuts a content may have removed the other.
            is_content = rendered.endswith(opening, 0, start) or rendered.startswith(closing, end)
            if not is_content:
                yield start, end, self._added[rendered[start:end]]
        yield len(rendered), len(rendered), None


class _ControlTexts:
    """Search for the texts of control tokens, of which a vocabulary may have very many."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = frozenset(strings)
        self._lengths = sorted({len(text) for text in strings}, reverse=True)
        letters = "".join(re.escape(letter) for letter in {text[0] for text in strings})
        self._first = re.compile(f"[{letters}]" if letters else "(?!)")
        # A text may end in a part of a control token that the next text completes. Words are not
        # marked: templates compare roles and types.
        self._by_head = sorted(text for text in strings if not text[0].isalnum())
        self._by_tail = sorted(text[::-1] for text in strings if not text[-1].isalnum())

    @classmethod
    @lru_cache(maxsize=4)
    def of(cls, strings: tuple[str, ...]) -> _ControlTexts:
        return cls([text for text in strings if text])

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each control token in a text, the longest where several begin."""
        at = 0
        while (match := self._first.search(text, at)) is not None:
            start = match.start()
            lengths = (n for n in self._lengths if text[start : start + n] in self._strings)
            length = next(lengths, 0)
            if length:
                yield start, start + length
            at = start + max(length, 1)

    def are_touched_by(self, text: str) -> bool:
        if text.isidentifier():
            return False
        is_there = next(self.spans(text), None) is not None
        return is_there or self._begins(text) or self._ends(text)

    def marked(self, text: str, opening: str, closing: str) -> str:
        if text.isidentifier():
            return text
        parts, at = [opening if self._begins(text) else ""], 0
        for start, end in self.spans(text):
            parts += [text[at:start], opening, text[start:end], closing]
            at = end
        return "".join([*parts, text[at:], closing if self._ends(text) else ""])

    def _begins(self, text: str) -> bool:
        """Return whether the text begins as a control token ends."""
        return _ends_as_one_begins(text[:_LONGEST_PART][::-1], self._by_tail)

    def _ends(self, text: str) -> bool:
        return _ends_as_one_begins(text[-_LONGEST_PART:], self._by_head)


def _ends_as_one_begins(text: str, strings: Sequence[str]) -> bool:
    """Return whether a suffix of the text is a proper prefix of one of these sorted strings."""
    for start in range(len(text)):
        part = text[start:]
        at = bisect_right(strings, part)
        if at < len(strings) and strings[at].startswith(part):
            return True
    return False


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings_in(key)
            yield from _strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings_in(item)


def _unused_characters(value: Any) -> tuple[str, str]:
    """Return two characters that no text contains, neither literally nor as JSON escapes them."""
    used: set[str] = set()
    escaped: set[str] = set()
    for text in _strings_in(value):
        used.update(text)
        escaped.update(re.findall(r"\\u[0-9a-f]{4}", text))
    left = (chr(c) for c in _MARKS if chr(c) not in used and f"\\u{c:04x}" not in escaped)
    first, second = next(left, None), next(left, None)
    if first is None or second is None:
        raise NoMarkLeft
    return first, second


def _stripped(text: str, before: AddedToken | None, behind: AddedToken | None) -> str:
    """Strip the whitespace that belongs to the tokens beside the text."""
    text = text.lstrip() if before is not None and before.strips_right else text
    return text.rstrip() if behind is not None and behind.strips_left else text
