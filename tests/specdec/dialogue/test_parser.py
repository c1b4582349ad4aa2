"""Calls that are broken, cut, unknown or too many."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dialogue_parsing import Parts, in_pieces, parsed
from dialogue_sample import TOOLS
from dialogue_samples import SAMPLES

from specdec.dialogue.channels import text_parser
from specdec.dialogue.deltas import ToolCallArguments, ToolCallBegin
from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.schemas import ArgumentTypes, as_json
from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tool_formats import TOOL_FORMATS

FORMATS = {form.name: form for form in TOOL_FORMATS}
THINK = next(form for form in THINKING_FORMATS if form.name == "think")


def output_format(name: str, **more: Any) -> OutputFormat:
    return OutputFormat(tools=FORMATS[name], types=ArgumentTypes(TOOLS), **more)


def calls(parts: Parts) -> list[Any]:
    return [(name, json.loads(text)) for name, text in parts.calls]


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        (
            "hermes",
            "<tool_call>get_weather, please</tool_call>",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "speed": 1}</tool_call>',
            '<tool_call>{"name": "f"}</tool_call>',
        ),
        ("glm", "<tool_call>two words</tool_call>", "<tool_call>f</tool_call>"),
        (
            "lfm2",
            "<|tool_call_start|>f<|tool_call_end|>",
            "<|tool_call_start|>[f()]<|tool_call_end|>",
        ),
        ("mistral", "[TOOL_CALLS]1, 2", "[TOOL_CALLS]f[ARGS]{}"),
        ("command-r7b", "<|START_ACTION|>[1]<|END_ACTION|>",
         '<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>'),
    ],
)  # fmt: skip
def test_a_bad_block_is_text_and_voids_no_other(name: str, bad: str, good: str, size: int) -> None:
    parts = parsed(output_format(name), in_pieces(good + bad + good, size))
    assert calls(parts) == [("f", {}), ("f", {})]
    assert parts.content == bad
    assert not parts.cuts


def test_a_bad_call_between_others_of_a_section() -> None:
    def call(arguments: str) -> str:
        return (
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            f"{arguments}<|tool_call_end|>"
        )

    text = call('{"a": 1}') + call("no") + call('{"a": 2}')
    text = f"<|tool_calls_section_begin|>{text}<|tool_calls_section_end|>"
    parts = parsed(output_format("kimi-k2"), [text])
    assert calls(parts) == [("f", {"a": 1}), ("f", {"a": 2})]
    assert parts.content == call("no").removesuffix("<|tool_call_end|>") + "<|tool_call_end|>"


def test_a_call_that_breaks_in_its_arguments_is_told() -> None:
    block = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    parts = parsed(output_format("hermes"), [block, '<tool_call>{"name": "g"}</tool_call>'])
    (cut,) = parts.cuts
    assert cut.index == 0
    assert "oops" in cut.note
    assert [name for name, _ in parts.calls] == ["f", "g"]
    assert parts.content == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"path": "a.txt", "text": "half'),
        ("hermes", "<tool_call>"),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nhalf"),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("llama3", '{"name": "f", "parameters"'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>"),
    ],
)
def test_a_cut_call_is_told_and_no_text(name: str, text: str) -> None:
    thinking = next((form for form in THINKING_FORMATS if form.name == name), None)
    channels = thinking.channels if thinking else None
    begins_in: Any = "header" if channels else "text"
    form = output_format(name, channels=channels, begins_in=begins_in)
    parts = parsed(form, [f"{text}"], "length")
    (cut,) = parts.cuts
    assert "max_tokens" in cut.note
    assert parts.content == ""


def test_unknown_names_pass_through_and_an_answer_in_json_is_an_answer() -> None:
    text = '<tool_call>{"name": "rm-rf", "arguments": null}</tool_call>'
    assert calls(parsed(output_format("hermes"), [text])) == [("rm-rf", {})]
    for text in ('{"name": "Ada", "age": 36}', '{"name": "f", "parameters": {}}', "{", "{}"):
        parts = parsed(output_format("hermes"), in_pieces(text, 1))
        assert (parts.content, parts.calls) == (text, [])
    text = '{"name": "f", "parameters": {}}'
    assert calls(parsed(output_format("llama3"), [text])) == [("f", {})]


def test_a_forced_call_is_read_in_any_format() -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    for name in FORMATS:
        form = output_format(name, is_call_forced=True)
        assert calls(parsed(form, in_pieces(text, 3))) == [("get_weather", {"city": "Rome"})]


def test_calls_beyond_the_limit_are_dropped() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parts = parsed(output_format("hermes", max_calls=1), [call, call])
    assert calls(parts) == [("f", {"a": 1})]
    assert parts.content == ""


def test_arguments_stream_as_they_are_written() -> None:
    parser = text_parser(output_format("qwen3-coder"))
    (begin, *_) = parser.push("<tool_call>\n<function=get_weather>\n<parameter=code>\n")
    assert isinstance(begin, ToolCallBegin)
    assert parser.push('print("a') == [ToolCallArguments(0, 'print(\\"a')]
    parser = text_parser(output_format("hermes"))
    parser.push('<tool_call>{"name": "f", "arguments": {"a": "')
    assert parser.push("one ") == [ToolCallArguments(0, "one ")]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{'a': \"it's\"}", {"a": "it's"}),
        ('{"a": True, "b": None, "c": [1,2,],}', {"a": True, "b": None, "c": [1, 2]}),
        ('{"a": "x\ny\t", "b": "\\d \\u00e9 \\ud83d"}', {"a": "x\ny\t", "b": "\\d é \ud83d"}),
        ('{"a": -1.5e3 "b": .5}', {"a": -1500.0, "b": 0.5}),
        ('{a: {"b": []}}', {"a": {"b": []}}),
    ],
)
def test_arguments_are_json_whatever_is_written(arguments: str, expected: Any) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    for size in (1, 1000):
        assert calls(parsed(output_format("hermes"), in_pieces(text, size))) == [("f", expected)]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("2", {"integer"}, 2),
        ("2", {"string"}, "2"),
        ("2", set(), 2),
        ("two", {"integer"}, "two"),
        ("True", {"boolean"}, True),
        ("null", {"string", "null"}, None),
        ("NaN", {"number"}, "NaN"),
        ('["a"]', {"array", "string"}, ["a"]),
        ('"a"', set(), '"a"'),
        ("{'a'", {"object"}, "{'a'"),
    ],
)
def test_values_without_quotes(text: str, types: set[str], expected: Any) -> None:
    assert json.loads(as_json(text, frozenset(types))) == expected


def test_types_of_references_and_unions() -> None:
    schema = {
        "properties": {
            "a": {"$ref": "#/$defs/A"},
            "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "c": {"enum": [1, "x"]},
            "d": {"$ref": "#/properties/d"},
        },
        "$defs": {"A": {"type": ["integer", "null"]}},
    }
    types = ArgumentTypes([{"function": {"name": "f", "parameters": schema}}])
    assert types.types("f", "a") == {"integer", "null"}
    assert types.types("f", "b") == {"string", "null"}
    assert types.types("f", "c") == {"number", "string"}
    assert types.types("f", "d") == types.types("g", "a") == frozenset()


def test_reasoning_tags_in_the_middle_of_an_answer_are_text() -> None:
    form = OutputFormat(thinking=THINK)
    text = "Write <think> first, </think> last."
    assert parsed(form, in_pieces(text, 2)).content == text
    parts = parsed(form, ["<think>", "\n\n", "</think>", "\n\n", "Yes"])
    assert (parts.reasoning, parts.content) == ("", "Yes")


@pytest.mark.parametrize(
    ("model", "name"), [("qwen3", "hermes"), ("qwen3_5", "qwen3-coder"), ("gemma4", "gemma4")]
)
def test_transformers_reads_the_same_parts(model: str, name: str) -> None:
    serving = pytest.importorskip("transformers.cli.serving.utils")
    from transformers.utils.chat_parsing import parse_response

    templates = serving._RESPONSE_TEMPLATE_FALLBACKS
    template = next(value for models, value in templates.items() if model in models)
    sample = next(sample for sample in SAMPLES if sample.tools == name)
    theirs = parse_response(sample.text, template, prefix="", tools=TOOLS)
    functions = [call["function"] for call in theirs["tool_calls"]]
    assert [(each["name"], each["arguments"]) for each in functions] == list(sample.calls)
    assert theirs.get("content", "").strip() == sample.content
    assert theirs.get("reasoning_content", "").strip() == sample.reasoning
