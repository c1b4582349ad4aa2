"""Outputs of several messages with a header each, as of gpt-oss (harmony) and Muse.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`: a header names the channel, and the
recipient of a call; `<|start|>assistant` of the first one is in the prompt.
"""

from __future__ import annotations

import re

from specdec.dialogue.cursor import Parsing
from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.parser import BROKEN_NOTE, CUT_NOTE, TextParser
from specdec.dialogue.values import Cut, Malformed, ValueReader

_RECIPIENT = re.compile(r"to=([\w.:/-]+)")
_NAMESPACE = "functions."
_REASONING = "analysis"
_SELF = "self"
_PLAIN_RECIPIENTS = ("user", "assistant", _SELF)


class ChannelParser(TextParser):
    """Incremental parser of a text of messages with headers."""

    def _parse(self) -> Parsing[None]:
        channels = self._form.channels
        assert channels is not None
        if self._form.is_call_forced:
            yield from self._bare_calls()
        if self._form.begins_in == "text":
            yield from self.content(channels.ends)
        while (yield from self._cursor.peek()):
            n_before = self._cursor.position
            header, stop = yield from self._cursor.collect_until((channels.message,))
            if stop is None:
                break  # a header alone is no text
            yield from self._message(header, n_before)

    def _message(self, header: str, n_before: int) -> Parsing[None]:
        channels, tools = self._form.channels, self._form.tools
        assert channels is not None
        recipients = _RECIPIENT.findall(header)
        recipient = next((name for name in recipients if name not in _PLAIN_RECIPIENTS), None)
        _, _, channel = header.rpartition(channels.channel)
        if recipient is not None and not channels.tags_calls:
            yield from self._recipient_call(recipient, has_tools=tools is not None)
        elif _SELF in recipients or channel.strip().startswith(_REASONING):
            self.begin_reasoning(self._cursor.position - n_before)
            emit = self._sink.text if self._form.thinking is None else self._sink.reasoning
            yield from self._cursor.read_until(channels.ends, emit)
            self.end_reasoning()
        else:
            yield from self.content(channels.ends)

    def _recipient_call(self, recipient: str, has_tools: bool) -> Parsing[None]:
        """Read a message to a function. One to a tool that is none is a part of no answer."""
        channels = self._form.channels
        assert channels is not None
        yield from self._cursor.skip()
        letter = yield from self._cursor.peek()
        is_function = recipient.startswith(_NAMESPACE) or recipient in self._form.types
        name = recipient.removeprefix(_NAMESPACE)
        if has_tools and is_function and (letter != "{" or not name):
            is_cut = not letter and bool(name)
            self._sink.cut(CUT_NOTE if is_cut else "a tool call has no JSON, and was dropped")
        elif has_tools and letter == "{":
            self._sink.begin(name)
            try:
                yield from ValueReader(self._cursor).members(self._sink.arguments)
                self._sink.end()
            except Cut:
                self._sink.cut(CUT_NOTE)
            except Malformed as error:
                self._sink.cut(f"{BROKEN_NOTE}{error}")
        yield from self._cursor.read_until(channels.ends, _ignore)


def text_parser(form: OutputFormat) -> TextParser:
    """Return a new parser of a format."""
    return TextParser(form) if form.channels is None else ChannelParser(form)


def _ignore(text: str) -> None:
    pass
