"""Clients of other APIs, unchanged: openai's responses and helpers, anthropic, litellm."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, ask

pytest.importorskip("llguidance")

KEY = "s3cret"
ASK = "Weather in Bern?"
TALK = [{"role": "user", "content": ASK}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ANTHROPIC_TOOL = {"name": "get_weather", "description": "Weather", "input_schema": PARAMETERS}
GREEDY = {"temperature": 0}
CITIES = ("Bern", "Oslo")


@pytest.fixture(scope="module")
def locked(served_model: Path) -> Iterator[Server]:
    """A server with a key, as agents are given one."""
    more = ("--spec-type", "none", "-c", "1024")
    with Server(served_model, *more, environment={"SPECDEC_API_KEY": KEY}) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def openai_client(locked: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{locked.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def anthropic_client(locked: Server) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0)


def test_a_response(openai_client: Any) -> None:
    response = openai_client.responses.create(
        model="any", input=ASK, max_output_tokens=6, temperature=0
    )
    assert response.output_text
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens"
    )  # fmt: skip
    assert response.usage.output_tokens == 6


def test_a_streamed_response(openai_client: Any) -> None:
    options = {"model": "any", "input": ASK, "max_output_tokens": 9, "temperature": 0}
    whole = openai_client.responses.create(**options).output_text
    with openai_client.responses.stream(**options) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == whole


def test_a_conversation_of_responses_with_tools(openai_client: Any) -> None:
    options = {"model": "any", "tools": [{"type": "function", **FUNCTION}], "temperature": 0}
    talk: list[Any] = list(TALK)
    response = openai_client.responses.create(input=talk, tool_choice="required", **options)
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in CITIES
    talk += [*response.output, {
        "type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"
    }]  # fmt: skip
    answer = openai_client.responses.create(input=talk, max_output_tokens=4, **options)
    assert answer.usage.input_tokens > response.usage.input_tokens


def test_parsed_answers(openai_client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Answer(pydantic.BaseModel):
        is_sunny: bool

    options = {"model": "any", "temperature": 0}
    chat = openai_client.chat.completions.parse(messages=TALK, response_format=Answer, **options)
    assert isinstance(chat.choices[0].message.parsed.is_sunny, bool)
    response = openai_client.responses.parse(input=ASK, text_format=Answer, **options)
    assert isinstance(response.output_parsed.is_sunny, bool)


def test_streamed_tools_of_chats(openai_client: Any) -> None:
    with openai_client.chat.completions.stream(
        model="any", messages=TALK, tools=[TOOL], tool_choice="required", temperature=0
    ) as stream:
        completion = stream.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in CITIES


def test_a_message(anthropic_client: Any) -> None:
    options = {"model": "claude", "max_tokens": 6, "messages": TALK, "extra_body": GREEDY}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    message = anthropic_client.messages.create(**options, system=system)
    assert message.content[0].text
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 6)
    with anthropic_client.messages.stream(**options, system=system) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text == final.content[0].text
    assert final.stop_reason == "max_tokens"


def test_tokens_of_messages_are_counted(anthropic_client: Any) -> None:
    given = {"model": "claude", "messages": TALK}
    count = anthropic_client.messages.count_tokens(**given).input_tokens
    usage = anthropic_client.messages.create(**given, max_tokens=1).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens
    with_tools = anthropic_client.messages.count_tokens(**given, tools=[ANTHROPIC_TOOL])
    assert with_tools.input_tokens > count


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_conversation_of_messages_with_tools(anthropic_client: Any, is_stream: bool) -> None:
    options = {"model": "claude", "max_tokens": 60, "tools": [ANTHROPIC_TOOL], "extra_body": GREEDY}
    forced = {**options, "messages": TALK, "tool_choice": {"type": "any"}}
    if is_stream:
        with anthropic_client.messages.stream(**forced) as stream:
            message = stream.get_final_message()
    else:
        message = anthropic_client.messages.create(**forced)
    (call,) = message.content
    assert (message.stop_reason, call.type) == ("tool_use", "tool_use")
    assert call.input["city"] in CITIES
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "4 degrees"}
    talk = [
        *TALK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = anthropic_client.messages.create(**options, messages=talk)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0


def test_a_wrong_message_raises_the_clients_error(anthropic_client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="messages"):
        anthropic_client.messages.create(model="claude", max_tokens=4, messages=[])
    other = anthropic_client.with_options(api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        other.messages.create(model="claude", max_tokens=4, messages=TALK)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["openai", "anthropic", "ollama_chat"])
def test_litellm(locked: Server, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = f"{locked.url}/v1" if provider == "openai" else locked.url
    options = {"model": f"{provider}/any", "api_base": base, "api_key": KEY, "messages": TALK}
    answer = litellm.completion(**options, max_tokens=4, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 4
    stream = litellm.completion(**options, max_tokens=4, temperature=0, stream=True)
    text = "".join(event.choices[0].delta.content or "" for event in stream)
    assert text == answer.choices[0].message.content


@pytest.mark.slow
def test_langchain(locked: Server) -> None:
    langchain = pytest.importorskip("langchain_openai")
    for uses_responses in (False, True):
        model = langchain.ChatOpenAI(
            model="any", base_url=f"{locked.url}/v1", api_key=KEY, temperature=0, max_tokens=60,
            use_responses_api=uses_responses,
        )  # fmt: skip
        answer = model.bind_tools([TOOL], tool_choice="required").invoke(ASK)
        assert answer.tool_calls[0]["args"]["city"] in CITIES


def test_cors(served_model: Path) -> None:
    """Only the pages of named origins may use a server."""
    import urllib.request

    more = ("--spec-type", "none", "-c", "64", "--cors-origin", "https://a.example")
    with Server(served_model, *more) as started:
        url = f"{started.ready().url}/v1/models"
        for origin, expected in (("https://a.example", "https://a.example"), ("null", None)):
            headers = {"Origin": origin, "Access-Control-Request-Method": "GET"}
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == expected


def test_names(served_model: Path) -> None:
    more = ("--spec-type", "none", "-c", "64", "--alias", "a, b", "--strict-model")
    with Server(served_model, *more) as started:
        started.ready()
        names = [card["id"] for card in json.loads(started.get("/v1/models")[1])["data"]]
        assert names == ["a", "b"]
        body = {"messages": TALK, "max_tokens": 1}
        statuses = [
            started.post("/v1/chat/completions", {**body, "model": name})[0]
            for name in ("a", "b", "c")
        ]
        assert statuses == [200, 200, 404]
        assert started.post("/v1/messages", {**body, "model": "c"})[1]["type"] == "error"


LONG_ASK = "A prompt of its own, of more than one block. " * 6


def test_progress_beside_a_response(openai_client: Any) -> None:
    options = {"model": "any", "input": "One: " + LONG_ASK, "max_output_tokens": 4}
    with openai_client.responses.stream(**options, extra_body={"return_progress": True}) as stream:
        events = list(stream)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    parts = [event.prompt_progress for event in events if hasattr(event, "prompt_progress")]
    num_tokens = events[-1].response.usage.input_tokens
    assert (parts[-1]["processed"], parts[-1]["total"]) == (num_tokens, num_tokens)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_progress_in_pings_of_messages(locked: Server, anthropic_client: Any) -> None:
    talk = [{"role": "user", "content": "Two: " + LONG_ASK}]
    options = {"model": "any", "max_tokens": 4, "messages": talk}
    more = {"return_progress": True}
    with anthropic_client.messages.stream(**options, extra_body=more) as stream:
        assert "".join(stream.text_stream) == stream.get_final_message().content[0].text
    lines = progress_lines(locked, "/v1/messages", {**options, **more, "stream": True})
    assert all(line["type"] == "ping" for line in lines)
    assert lines[-1]["prompt_progress"]["processed"] == lines[-1]["prompt_progress"]["total"]
    assert not progress_lines(locked, "/v1/messages", {**options, "stream": True})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "Three: " + LONG_ASK}]}),
        ("/api/generate", {"prompt": "Four: " + LONG_ASK}),
        ("/api/generate", {"prompt": "Five: " + LONG_ASK, "raw": True}),
    ],
)
def test_progress_in_lines_of_ollama(locked: Server, path: str, fields: dict[str, Any]) -> None:
    body = {**fields, "options": {"num_predict": 4}}
    lines = progress_lines(locked, path, {**body, "return_progress": True})
    assert not any(line["done"] for line in lines)
    assert not any(line.get("response") or line.get("message", {}).get("content") for line in lines)
    assert lines[-1]["prompt_progress"]["processed"] == lines[-1]["prompt_progress"]["total"]
    assert not progress_lines(locked, path, body)


def progress_lines(server: Server, path: str, body: Any) -> list[dict[str, Any]]:
    """Return the objects of a stream that have a progress."""
    request = urllib.request.Request(
        server.url + path,
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    status, text = ask(request)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    values = [json.loads(line) for line in lines if line.startswith("{")]
    return [value for value in values if "prompt_progress" in value]
