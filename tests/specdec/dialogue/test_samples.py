"""Every format, whole and in pieces: the same calls, reasoning and content."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dialogue_parsing import Parts, in_pieces, output_format, parsed
from dialogue_sample import Sample
from dialogue_samples import SAMPLES
from hypothesis import given
from hypothesis import strategies as st

from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tool_formats import TOOL_FORMATS

NAMES = [f"{i}-{sample.tools}" for i, sample in enumerate(SAMPLES)]


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


def test_the_docs_have_every_format() -> None:
    text = (Path(__file__).parents[3] / "docs" / "server.md").read_text()
    for form in TOOL_FORMATS:
        assert f"| {form.name} | {form.models} |" in text
    for thinking in THINKING_FORMATS:
        assert f"\n| {thinking.name} | " in text
