"""Every format, whole and in pieces: the same calls, reasoning and content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from dialogue_samples import SAMPLES, TOOLS, Sample

from specdec.dialogue.channels import text_parser
from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallCut,
)
from specdec.dialogue.parser import OutputFormat
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.table import THINKING_FORMATS, TOOL_FORMATS

NAMES = [f"{i}-{sample.tools}" for i, sample in enumerate(SAMPLES)]


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


def check(sample: Sample, parts: Parts) -> None:
    assert not parts.cuts
    assert [(name, json.loads(arguments)) for name, arguments in parts.calls] == list(sample.calls)
    assert parts.content == sample.content
    assert parts.reasoning == sample.reasoning


@pytest.mark.parametrize("n", [1, 2, 3, 7, 10_000])
@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_the_parts_of_an_output_do_not_depend_on_its_pieces(sample: Sample, n: int) -> None:
    form = output_format(sample)
    parts = parsed(form, in_pieces(sample.text, n))
    check(sample, parts)
    assert parts == parsed(form, [sample.text])


def test_every_format_has_a_sample() -> None:
    assert {sample.tools for sample in SAMPLES} == {form.name for form in TOOL_FORMATS}


@given(st.data())
def test_random_pieces_of_random_samples(data: st.DataObject) -> None:
    sample = data.draw(st.sampled_from(SAMPLES))
    cuts = data.draw(st.sets(st.integers(1, len(sample.text) - 1), max_size=12))
    ends = [0, *sorted(cuts), len(sample.text)]
    pieces = [sample.text[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    check(sample, parsed(output_format(sample), pieces))


@given(st.data())
def test_a_cut_output_shows_no_part_of_a_call_and_only_whole_calls_are_json(
    data: st.DataObject,
) -> None:
    sample = data.draw(st.sampled_from([sample for sample in SAMPLES if sample.calls]))
    end = data.draw(st.integers(0, len(sample.text)))
    form = output_format(sample)
    text = sample.text[:end]
    parts = parsed(form, in_pieces(text, data.draw(st.sampled_from([1, 5, 1000]))), "length")
    assert parts == parsed(form, [text], "length")
    cut = {delta.index for delta in parts.cuts}
    whole = [call for i, call in enumerate(parts.calls) if i not in cut]
    arguments = [(name, json.loads(text)) for name, text in whole]
    assert arguments == list(sample.calls[: len(arguments)])
    assert len(parts.calls) - len(whole) <= 1
    assert "get_weather" not in parts.content
    assert "Paris" not in parts.content


_FRAGMENTS = sorted(
    {
        text
        for form in TOOL_FORMATS
        for text in (*form.begins, *form.ends, *(getattr(form.calls[0], "closings", ())))
    }
    | {mark for form in THINKING_FORMATS for mark in (*form.opens, *form.closes, *form.ignored)}
    | {'{"name": "get_weather", ', '"arguments": {', "}", "]", "[", '"', "\\", "\n", " x", "=", "("}
    | {"get_weather", "<function=get_weather>", "<parameter=a>", "</parameter>", "</function>"}
    | {"<arg_key>", "</arg_key>", "call:f{a:", "f(a='", "'", "<|channel|>", "<|message|>", "to=f"}
)


@given(
    sample=st.sampled_from(SAMPLES),
    fragments=st.lists(st.sampled_from(_FRAGMENTS), max_size=14),
    n=st.integers(1, 9),
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_output_is_parsed_alike_in_pieces_and_its_calls_are_json(
    sample: Sample, fragments: list[str], n: int, reason: str
) -> None:
    form, text = output_format(sample), "".join(fragments)
    parts = parsed(form, [text], reason)
    assert parts == parsed(form, in_pieces(text, n), reason)
    cut = {delta.index for delta in parts.cuts}
    for i, (name, arguments) in enumerate(parts.calls):
        assert name
        assert i in cut or isinstance(json.loads(arguments), dict)
