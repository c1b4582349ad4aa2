"""Parsing of outputs in tests: whole or in pieces, and the parts that come out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dialogue_sample import TOOLS, Sample

from specdec.dialogue.channels import text_parser
from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallCut,
)
from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tool_formats import TOOL_FORMATS


@dataclass
class Parts:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    cuts: list[ToolCallCut] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallBegin(index, _, name):
                    assert index == len(self.calls)
                    self.calls.append([name, ""])
                case ToolCallArguments(index, text):
                    self.calls[index][1] += text
                case ToolCallCut():
                    self.cuts.append(delta)


def output_format(sample: Sample) -> OutputFormat:
    thinking = next((form for form in THINKING_FORMATS if form.name == sample.thinking), None)
    return OutputFormat(
        tools=next(form for form in TOOL_FORMATS if form.name == sample.tools),
        thinking=thinking,
        channels=thinking.channels if thinking else None,
        begins_in=sample.begins_in,
        types=ArgumentTypes(TOOLS),
    )


def parsed(form: OutputFormat, pieces: Sequence[str], reason: str = "stop") -> Parts:
    parser, parts = text_parser(form), Parts()
    for piece in pieces:
        parts.add(parser.push(piece))
    parts.add(parser.finish(reason))
    return parts


def in_pieces(text: str, n: int) -> list[str]:
    return [text[i : i + n] for i in range(0, len(text), n)]
