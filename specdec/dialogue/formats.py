"""The table's columns: how a model writes reasoning and tool calls; the format of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specdec.dialogue.schemas import ArgumentTypes
from specdec.sampling.reasoning_budget import ReasoningMarks


@dataclass(frozen=True)
class JsonCalls:
    """Calls as JSON objects, one after another or in an array.

    has_name_as_key: `{"f": {...}}` rather than `{"name": "f", "arguments": {...}}`.
    """

    has_name_as_key: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class NamedCalls:
    """Calls as a name, and arguments of one notation behind it.

    name_ends: end the name; those that begin the arguments, `{` and `(`, belong to them.
    opening: comes before each call. before_name: alternatives that are no part of the name.
    id_end: ends an id behind the name. leading_id_end: ends one before it.
    before_arguments: may come before them. closings: may come behind them.
    raw_quote: see ValueReader. text_name: no call, but text follows this name.
    """

    name_ends: tuple[str, ...]
    opening: str = ""
    before_name: tuple[str, ...] = ()
    id_end: str = ""
    leading_id_end: str = ""
    before_arguments: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    raw_quote: str = ""
    text_name: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of a call, which an output may end in a part of."""
        own = (self.opening, self.id_end, self.leading_id_end)
        return (*own, *self.name_ends, *self.before_name, *self.before_arguments, *self.closings)


@dataclass(frozen=True)
class TaggedCalls:
    """Calls whose arguments have a tag each: `<parameter=city>Paris</parameter>`.

    name_ends: end the name of the function. tag_end: ends the attributes behind that, if any.
    parameter: comes before an argument's name, key_end behind it, and value_tag_end behind the
    attributes, of which `string="true"` or `type="string"` tell a text. value_end may hold `{key}`.
    strips_newline: one line break at both ends of a value is no part of it.
    """

    opening: str
    name_ends: tuple[str, ...]
    parameter: str
    key_end: str
    value_end: str
    closing: str
    tag_end: str = ""
    value_tag_end: str = ""
    strips_newline: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """See NamedCalls."""
        ends = (self.key_end, self.value_end, self.closing, self.tag_end, self.value_tag_end)
        return (self.opening, self.parameter, *self.name_ends, *ends)


Calls = JsonCalls | NamedCalls | TaggedCalls
CallIds = Literal["call", "mistral", "kimi"]
_JSON = JsonCalls()


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    marks: alternatives of texts that a chat template of this format contains, all of one of them.
    begins: any of them begins a section of calls. ends: any of them ends it.
    calls: notations that are tried in this order; JSON is understood in any section.
    ends_reasoning: whether a section may begin inside of reasoning, and ends it.
    example: a call of `{name}` with JSON `{arguments}`, for models whose template tells nothing.
    ignored_names: functions that stand for an answer without a call.
    is_bare: whether calls need no mark at an answer's begin.
    """

    name: str
    models: str
    marks: tuple[tuple[str, ...], ...]
    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()
    calls: tuple[Calls, ...] = (_JSON,)
    ids: CallIds = "call"
    ends_reasoning: bool = False
    is_bare: bool = False
    ignored_names: tuple[str, ...] = ()
    example: str = ""


@dataclass(frozen=True)
class ChannelMarks:
    """Marks of headers, see `channels.py`.

    reasoning: header of a reasoning. skipping: header of an answer without one.
    tags_calls: whether calls have tags inside of their message; else all of it is the arguments.
    """

    start: str
    message: str
    ends: tuple[str, ...]
    reasoning: str
    skipping: str
    channel: str = "<|channel|>"
    tags_calls: bool = False


@dataclass(frozen=True)
class ThinkingFormat:
    """Format of reasoning.

    marks: texts that the template, or an added token of the vocabulary, contains; by default the
        first of `opens`.
    opens, closes: begin and end the reasoning.
    ignored: marks around the answer, which are no text.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    channels: ChannelMarks | None = None

    @property
    def reasoning_marks(self) -> ReasoningMarks:
        """Texts around the reasoning."""
        form = self.channels
        if form is None:
            return ReasoningMarks(self.opens, self.closes, self.closes[0])
        return ReasoningMarks(
            (form.reasoning,), form.ends, f"{form.ends[0]}{form.start}{form.skipping}"
        )


@dataclass(frozen=True)
class OutputFormat:
    """Format of one answer.

    tools: None if no tools were offered. thinking: None if reasoning is not told apart.
    channels: None unless an output has headers.
    begins_in: where the prompt ends: in a "header", "reasoning", "text" or a section of a "call".
    token_names: control tokens by the characters that stand for them, see `tokens.py`.
    is_call_forced: whether a constraint makes the text a call in JSON.
    """

    tools: ToolFormat | None = None
    thinking: ThinkingFormat | None = None
    channels: ChannelMarks | None = None
    begins_in: Literal["header", "reasoning", "text", "call"] = "text"
    types: ArgumentTypes = field(default_factory=ArgumentTypes)
    max_calls: int | None = None
    is_call_forced: bool = False
    token_names: Mapping[int, str] = field(default_factory=dict)
