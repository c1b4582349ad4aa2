"""Tool calls are found in whole outputs and in chunks; everything else stays text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from specdec.serve.tools import ToolCallParser

NAMES = ("add", "get_weather")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
LLAMA = '{"name": "get_weather", "parameters": {"city": "Zürich"}}'


def parse(text: str, limit: int | None = None, size: int | None = None):
    """Return (text for the reader, [(name, arguments), ...]), pushed in chunks of `size`."""
    parser = ToolCallParser(NAMES, limit)
    size = size or max(len(text), 1)
    shown = "".join(parser.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = parser.finish()
    return shown + rest, [
        (call.function.name, json.loads(call.function.arguments)) for call in calls
    ]


ADD = ("add", {"a": 1, "b": "é"})
WEATHER = ("get_weather", {"city": "Zürich"})
CASES = {
    "nothing": ("", "", []),
    "text": ("Just text, with { and <tool.", "Just text, with { and <tool.", []),
    "spaces": ("  a \n\n", "  a \n\n", []),
    "hermes": (HERMES, "", [ADD]),
    "hermes after text": (f"Let me see.\n{HERMES}\n", "Let me see.", [ADD]),
    "two of hermes": (f"{HERMES}\n{HERMES}", "", [ADD, ADD]),
    "hermes, not closed": (HERMES.removesuffix("\n</tool_call>"), "", [ADD]),
    "llama": (LLAMA, "", [WEATHER]),
    "llama, spaces": (f"\n {LLAMA} \n", "", [WEATHER]),
    "llama, tagged": (f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    "two of llama": (f"{LLAMA}; {LLAMA}", "", [WEATHER, WEATHER]),
    "no arguments": ('<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    "arguments as a text": (
        '{"name": "add", "arguments": "{\\"a\\": 2}"}',
        "",
        [("add", {"a": 2})],
    ),
    "json of another kind": ('{"a": [1, 2]}', '{"a": [1, 2]}', []),
    "another tool": ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    "broken": ("<tool_call>{oops</tool_call>", "<tool_call>{oops</tool_call>", []),
    "one of two broken": (f"{HERMES}<tool_call>{{", f"{HERMES}<tool_call>{{", []),
    "llama after text": (f"See: {LLAMA}", f"See: {LLAMA}", []),
    "deep": ("{" * 5000, "{" * 5000, []),
    "arguments are a list": ('{"name": "add", "arguments": [1]}',) * 2 + ([],),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [None, 1, 3, 7])
def test_what_is_found(name: str, size: int | None) -> None:
    text, shown, calls = CASES[name]
    assert parse(text, size=size) == (shown, calls)


def test_no_more_calls_than_wanted() -> None:
    assert parse(f"{HERMES}{HERMES}", limit=1) == ("", [ADD])


def test_every_call_has_its_own_id() -> None:
    parser = ToolCallParser(NAMES)
    parser.push(HERMES * 2)
    first, second = parser.finish()[1]
    assert first.id != second.id
    assert first.id.startswith("call_")


@given(
    st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", " ", "x", "<", LLAMA])),
    st.integers(1, 9),
)
def test_chunks_do_not_matter_and_text_without_calls_is_whole(parts: list[str], size: int) -> None:
    text = "".join(parts)
    actual = parse(text, size=size)
    assert actual == parse(text)
    assert actual[1] or actual[0] == text
