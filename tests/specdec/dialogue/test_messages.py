"""Tools, calls and results in prompts, for templates that show them and for others."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("jinja2")

from dialogue_sample import TOOLS

from specdec.dialogue.messages import adapted
from specdec.dialogue.recognition import knows_tools, thinking_format, tool_format
from specdec.dialogue.traits import TemplateTraits, traits_of
from specdec.text.chat_template import render_chat

SPECIAL = {"eos_token": "</s>"}
BARE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TURNS = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPPING = (  # it shows calls and tools, and nothing of results
    "{{ tools | tojson }}{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}{% endfor %}{% endif %}{% endfor %}"
)
SINGLE = (
    "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}<{{ m.role }}>{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}"
)


def call(call_id: str | None, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {**({"id": call_id} if call_id else {}), "type": "function", "function": function}


def talk(*ids: str | None) -> list[dict[str, Any]]:
    calls = [call(call_id, f"city-{i}") for i, call_id in enumerate(ids)]
    results = [
        {"role": "tool", "content": f"result-{i}", **({"tool_call_id": call_id} if call_id else {})}
        for i, call_id in enumerate(ids)
    ]
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "user", "content": "And?"},
    ]


def shown(template: str, messages: list[dict[str, Any]], tools: Any = TOOLS) -> str:
    traits = traits_of(template, json.dumps(SPECIAL))
    return render_chat(
        template, *_before_tokens(adapted(messages, tools, traits, tool_format(template)))
    )


def _before_tokens(result: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    messages, tools = result
    return messages, SPECIAL, tools


@pytest.mark.parametrize("template", [BARE, TURNS, DROPPING, SINGLE])
def test_nothing_is_dropped_whatever_the_template_knows(template: str) -> None:
    text = shown(template, talk("call_a", "call_b"))
    for part in ("Weather?", "city-0", "city-1", "result-0", "result-1", "And?", "Number of days"):
        assert part in text, part
    assert "None" not in text


def test_a_model_without_tools_is_told_of_them_in_a_system_message() -> None:
    text = shown(BARE, [{"role": "system", "content": "Be brief."}, *talk("a")])
    assert text.startswith("<system>Be brief.\n\n# Tools")
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "city-0"}}' in text
    assert "<tool>result-0" in text
    text = shown(TURNS, talk("a"))
    assert text.startswith("<user># Tools")
    assert "<user><tool_response>\nresult-0\n</tool_response>\n\nAnd?" in text
    assert "# Tools" not in shown(BARE, talk("a"), [])


def test_calls_are_split_for_a_template_that_takes_one() -> None:
    text = shown(SINGLE, talk("a", "b"))
    assert text.index("city-0") < text.index("result-0") < text.index("city-1")
    assert not traits_of(SINGLE, json.dumps(SPECIAL)).takes_many_calls


@pytest.mark.parametrize(
    ("template", "pattern"),
    [
        ("[TOOL_CALLS] tools", r"[A-Za-z0-9]{9}"),
        ("<|tool_calls_section_begin|> tools", r"functions\.get_weather:\d"),
    ],
)
@pytest.mark.parametrize("ids", [("call_0123456789", "call_x"), (None, None), ("a", "b")])
def test_ids_are_those_of_the_format(template: str, pattern: str, ids: Any) -> None:
    traits = TemplateTraits(True, True, True, takes_null=True)
    messages, _ = adapted(talk(*ids), TOOLS, traits, tool_format(template))
    calls, results = messages[1]["tool_calls"], messages[2:4]
    own = [each["id"] for each in calls]
    assert len(set(own)) == 2
    assert all(re.fullmatch(pattern, each) for each in own)
    assert [each["tool_call_id"] for each in results] == own
    assert [each["name"] for each in results] == ["get_weather"] * 2
    assert messages[1]["content"] is None


def test_results_out_of_order_keep_their_calls() -> None:
    messages = talk("a", "b")
    messages[2], messages[3] = messages[3], messages[2]
    traits = TemplateTraits(True, True, True)
    result, _ = adapted(messages, TOOLS, traits, tool_format("[TOOL_CALLS] tools"))
    first, second = (each["id"] for each in result[1]["tool_calls"])
    assert [each["tool_call_id"] for each in result[2:4]] == [second, first]


def test_formats_are_recognised_by_the_template_then_by_tokens() -> None:
    assert tool_format("{{ tools }}<tool_call>").name == "hermes"
    assert tool_format("{{ tools }}", ["[TOOL_CALLS]"]).name == "mistral"
    assert tool_format("{{ messages }}", ["[TOOL_CALLS]"]).name == "hermes"
    assert tool_format(None).name == "hermes"
    assert not knows_tools(None)
    assert thinking_format("<think>") is not None
    assert thinking_format("{{ messages }}") is None
    by_token = thinking_format("{{ messages }}", ["[THINK]"])
    assert by_token is not None
    assert by_token.name == "mistral"
