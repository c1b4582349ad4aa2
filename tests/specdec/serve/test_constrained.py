"""response_format and forced tool calls, with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Server

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

TALK = [{"role": "user", "content": "hi"}]
COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "tiny", "messages": TALK, "max_tokens": 200, "seed": 1, **options}
    return client.chat.completions.create(**given)


def tool(name: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    function = {"name": name, "description": "of a test"}
    return {"type": "function", "function": function | ({"parameters": schema} if schema else {})}


def test_a_json_schema(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR, "strict": True}}
    answer = chat(client, response_format=form, n=3)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert json.loads(choice.message.content)["colour"] in ("red", "green")
    (choice,) = chat(client, response_format=form, temperature=0).choices
    assert json.loads(choice.message.content)


def test_any_json_object(client: Any) -> None:
    options = {"response_format": {"type": "json_object"}, "max_tokens": 40, "temperature": 0}
    text = chat(client, **options).choices[0].message.content
    assert text.lstrip()[0] == "{"


def test_a_wrong_format_is_reported_by_its_own_kind(client: Any) -> None:
    for form, named in (
        ({"type": "json_schema", "json_schema": {"name": "c", "schema": True}}, "schema.schema: "),
        ({"type": "json_schema"}, "json_schema: Field required"),
        ({"type": "s3cret"}, "must be one of 'text', 'json_object', 'json_schema'"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, response_format=form)
        assert named in caught.value.message
        assert "s3cret" not in caught.value.message


def test_a_schema_that_is_none(client: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "colour"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        chat(client, response_format=form)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (
            {
                "allOf": [
                    {"type": "string", "pattern": f".*{letter}.*"}
                    for letter in "abcdefghijklmnopqrstuv"
                ]
            },
            "to prepare",
        ),
        ({"$ref": "#"}, "cannot be kept to"),  # which permits nothing
        ({"$ref": "file:///etc/passwd"}, "does not fetch"),
    ],
)
def test_a_schema_that_nothing_can_follow(
    client: Any, server: Server, schema: dict[str, Any], named: str
) -> None:
    """It is refused at a bounded cost: the first one took all memory and never ended."""
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=named):
        chat(client, response_format=form)
    assert server.metric("specdec_requests_inside") == 0
    assert server.metric("specdec_resident_bytes") < 1 << 30


def test_nothing_of_a_schema_is_written_down(client: Any, server: Server) -> None:
    """llguidance warns of an unknown format by its name."""
    schema = {"x-guidance": {"lenient": True}, "type": "string", "format": "s3cret"}
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    for _ in range(2):  # the log of the first one is read by then
        assert chat(client, response_format=form, max_tokens=4).choices
    assert "s3cret" not in "".join(server.lines)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
def test_a_forced_call(client: Any, choice: Any) -> None:
    options = {"tools": [tool("paint", COLOUR)], "tool_choice": choice}
    answer = chat(client, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    events = [event.choices[0] for event in chat(client, **options, stream=True)]
    assert events[-1].finish_reason == "tool_calls"
    reported = [item for event in events for item in event.delta.tool_calls or []]
    assert [item.function.name for item in reported if item.function.name] == ["paint"]
    arguments = "".join(item.function.arguments for item in reported)
    assert arguments == call.function.arguments
    assert not any(event.delta.content for event in events)


def test_a_forced_call_whose_schema_names_its_parts(client: Any) -> None:
    """pydantic's schemas use `#` for the tool's schema, not for the combination of several."""
    schema = {
        "$defs": {"Colour": {"enum": ["red", "green"]}},
        "type": "object",
        "properties": {"colour": {"$ref": "#/$defs/Colour"}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    other = {**schema, "$defs": {"Colour": {"enum": ["blue"]}}}
    tools = [tool("paint", schema), tool("wash", other)]
    for seed in range(4):
        answer = chat(client, tools=tools, tool_choice="required", seed=seed)
        call = answer.choices[0].message.tool_calls[0].function
        allowed = ["red", "green"] if call.name == "paint" else ["blue"]
        assert json.loads(call.arguments)["colour"] in allowed


def test_a_forced_call_of_one_of_several(client: Any) -> None:
    tools = [tool("paint", COLOUR), tool("wash", COLOUR)]
    call = chat(client, tools=tools, tool_choice="required").choices[0].message.tool_calls[0]
    assert call.function.name in ("paint", "wash")
    named = {"type": "function", "function": {"name": "wash"}}
    call = chat(client, tools=tools, tool_choice=named).choices[0].message.tool_calls[0]
    assert call.function.name == "wash"
    with pytest.raises(openai.BadRequestError, match="none of the tools"):
        chat(client, tools=tools[:1], tool_choice=named)
