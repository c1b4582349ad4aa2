"""Requests parsed from lines, and errors of lines without a request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.batch.lines import MAX_LINE_BYTES, Line
from specdec.batch.records import OpenAiForm, PlainForm, key_of, to_line
from specdec.batch.request import (
    CHAT,
    COMPLETIONS,
    LineError,
    LineRequest,
    Rules,
    line_seed,
    read_request,
)
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import is_conversation

RULES = Rules("the-model", {"max_tokens": 5})
HI = [{"role": "user", "content": "hi"}]


def line_of(data: bytes, number: int = 1) -> Line:
    return Line(number, 99, data, len(data))


def read(value: Any, rules: Rules = RULES, number: int = 1) -> LineRequest:
    return read_request(line_of(json.dumps(value).encode(), number), rules)


def openai(url: str = CHAT, **body: Any) -> dict[str, Any]:
    body.setdefault("messages" if url == CHAT else "prompt", HI if url == CHAT else "hi")
    return {"custom_id": "one", "method": "POST", "url": url, "body": {"model": "gpt", **body}}


# --- accepted -------------------------------------------------------------------------------------


def test_a_plain_prompt_has_the_defaults_of_the_run() -> None:
    request = read({"prompt": "hi"})
    assert request.prompt == "hi"
    assert request.form == PlainForm({"prompt": "hi"})
    assert request.params == SamplingParams(max_tokens=5, seed=line_seed(0, 1))


def test_a_plain_line_says_what_is_different() -> None:
    request = read(
        {"messages": HI, "temperature": 0.5, "max_tokens": 9, "stop": "x", "seed": 3, "id": [1]}
    )
    assert request.prompt == HI
    assert request.params == SamplingParams(temperature=0.5, max_tokens=9, stop=("x",), seed=3)
    assert request.form.failed(line_of(b"").key, "no")["id"] == [1]


def test_a_chat_of_openais() -> None:
    body = {"max_completion_tokens": 7, "top_p": 0.5, "logprobs": True, "top_logprobs": 2, "n": 2}
    request = read(openai(temperature=1, presence_penalty=1, user="me", stream=False, **body))
    assert request.form == OpenAiForm("one", is_chat=True)
    assert request.prompt == HI
    assert request.model == "gpt"
    assert request.params == SamplingParams(
        max_tokens=7,
        top_p=0.5,
        logprobs=2,
        n=2,
        temperature=1.0,
        presence_penalty=1,
        seed=line_seed(0, 1),
    )


def test_a_completion_of_openais() -> None:
    request = read(
        openai(COMPLETIONS, prompt=[5, 6], logprobs=0, logit_bias={"7": -100}, stop=None)
    )
    assert request.form == OpenAiForm("one", is_chat=False)
    assert request.prompt == [5, 6]
    assert request.params.logprobs is True
    assert request.params.logit_bias == ((7, -100.0),)


def test_a_format_of_openais_is_a_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    request = read(openai(response_format=response_format, logprobs=False))
    assert json.loads(str(request.params.json_schema)) == schema
    assert read(openai(response_format={"type": "json_object"})).params.json_object
    assert read(openai(response_format={"type": "text"})).params.constraint is None
    assert read({"prompt": "x", "regex": "[ab]+"}).params.regex == "[ab]+"


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = read(openai(messages=[{"role": "user", "content": parts}]))
    assert request.prompt == [{"role": "user", "content": "a\nb"}]


def test_a_message_may_have_no_content() -> None:
    """An answer that called tools has none; the server accepts it, too."""
    for message in ({"role": "developer"}, {"role": "system", "content": None}):
        request = read(openai(messages=[message]))
        assert request.prompt == [{"role": "system", "content": ""}]
        assert is_conversation(request.prompt)
    assert not is_conversation(read({"prompt": [5]}).prompt)


def test_a_schema_may_be_missing() -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "n"}}
    assert read(openai(response_format=response_format)).params.json_object


def test_seeds_are_of_the_run_and_of_the_line() -> None:
    def seed(run: int, number: int) -> int | None:
        return read({"prompt": "x"}, Rules("m", {}, run), number).params.seed

    assert seed(0, 1) == seed(0, 1)
    assert len({seed(0, 1), seed(0, 2), seed(1, 1)}) == 3
    assert read({"prompt": "x", "seed": 4}, Rules("m", {}, 9)).params.seed == 4


# --- refused, by name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ({}, ("neither a prompt nor messages",)),
        ({"promt": "x"}, ("neither a prompt nor messages", '"promt" should be prompt')),
        ([1], ("holds an array", "object")),
        ({"prompt": "x", "temprature": 1}, ('"temprature"', "leave them out")),
        ({"prompt": "x", "messages": HI}, ("both a prompt and messages",)),
        ({"prompt": 5}, ("one text or one list of token ids",)),
        ({"prompt": ["a", "b"]}, ("one prompt a line",)),
        ({"prompt": [True]}, ("one prompt a line",)),
        ({"prompt": "x", "temperature": "hot"}, ("temperature is 'hot'", "a number")),
        ({"prompt": "x", "temperature": -1}, ("temperature is -1",)),
        ({"prompt": "x", "temperature": 10**400}, ("temperature is an integer too large",)),
        ({"prompt": "x", "max_tokens": 0}, ("max_tokens is 0", "at least 1")),
        ({"prompt": "x", "max_tokens": 1.5}, ("max_tokens is 1.5",)),
        ({"prompt": "x", "n": 2}, ("n (num_return_sequences) is 2", "temperature")),
        ({"prompt": "x", "stop": 5}, ("stop is 5",)),
        ({"prompt": "x", "stop_token_ids": 5}, ("stop_token_ids is 5", "wrong shape")),
        ({"prompt": "x", "ignore_eos": "yes"}, ("ignore_eos is 'yes'",)),
        ({"prompt": "x", "logit_bias": {"a": 1}}, ("logit_bias", "token ids and numbers")),
        ({"prompt": "x", "logit_bias": 3}, ("logit_bias is 3",)),
        ({"prompt": "x", "logit_bias": {"1": 10**400}}, ("too large",)),
        ({"prompt": "x", "model": 3}, ("model is 3",)),
        ({"messages": "hi"}, ("messages is 'hi'",)),
        ({"messages": [5]}, ("messages holds 5",)),
        ({"messages": [{"role": "user", "content": 5}]}, ("content of a message is 5",)),
        ({"messages": [{"content": "x"}]}, ("role of a message is null",)),
        ({"messages": [{**HI[0], "tool_calls": []}]}, ("a message", '"tool_calls"')),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("'text'",)),
        ({"prompt": "x", "metadata": [[[[1] * 2]] * 2]}, ()),
        ({**openai(), "custom_id": None}, ("custom_id is null",)),
        ({**openai(), "method": "GET"}, ('method is "GET"', "POST")),
        ({**openai(), "url": "/v1/embeddings"}, ('"/v1/embeddings"', CHAT)),
        ({**openai(), "body": 3}, ("body is 3",)),
        ({**openai(), "more": 3}, ('"more"',)),
        (openai(tools=[{}], foo=1), ('body has fields that are not known here: "tools", "foo"',)),
        (openai(max_token=3), ('"max_token" (did you mean max_tokens?)',)),
        ({"prompt": "x", "tempratur": 0}, ('"tempratur" (did you mean temperature?)',)),
        (openai(stream=True), ("stream is true", "only false")),
        (openai(response_format={"type": "xml"}), ("response_format is", "json_object")),
        (
            openai(response_format={"type": "json_schema", "json_schema": 3}),
            ("json_schema.schema",),
        ),
        (openai(response_format=3), ("response_format is 3",)),
        (openai(response_format={"type": "json_object"}, regex="a"), ("may have one of them",)),
        ({"prompt": "x", "regex": "("}, ("regex cannot be kept to",)),
        (openai(COMPLETIONS, messages=HI), ('"messages"',)),
        (openai(COMPLETIONS, logprobs=True), ("logprobs is True",)),
        (openai(logprobs=5), ("logprobs is 5", "bool")),
        (openai(top_logprobs=5), ("top_logprobs is 5, but logprobs is not true",)),
        (openai(max_tokens=5, max_completion_tokens=6), ("max_tokens is 5 and", "is 6")),
    ],
)
def test_a_mistake_is_named(value: Any, parts: tuple[str, ...]) -> None:
    if not parts:
        assert read(value)
        return
    with pytest.raises(LineError) as caught:
        read(value)
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"{", "not JSON"),
        (b"\xff{}", "byte 0 of the line is not UTF-8"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "metadata": 1e999}', "1e999"),
        (b"[" * 100_000, "nested more than 64"),
        (b'{"prompt": "x", "metadata": ' + b"[" * 70 + b"]" * 70 + b"}", "nested more than 64"),
        (b'{"prompt": "x", "metadata": ' + b"9" * 5000 + b"}", "value has 5000 digits"),
    ],
)
def test_bytes_that_are_no_request(data: bytes, part: str) -> None:
    with pytest.raises(LineError, match="JSON|UTF-8|nested") as caught:
        read_request(line_of(data), RULES)
    assert part in str(caught.value)


def test_a_huge_line_is_named_with_its_size() -> None:
    with pytest.raises(LineError, match="17.00 MiB, but at most 16.00 MiB"):
        read_request(Line(1, 99, b"", 17 << 20), RULES)
    assert MAX_LINE_BYTES == 16 << 20


def test_an_unpaired_surrogate_is_repeated_as_it_came() -> None:
    request = read_request(line_of(rb'{"prompt": "x", "id": "\ud800"}'), RULES)
    record = to_line(request.form.failed(line_of(b"").key, "no"))
    assert json.loads(record)["id"] == "\ud800"


# --- anything -------------------------------------------------------------------------------------

NAMES = st.sampled_from(
    "prompt messages model temperature top_p top_k min_p n seed stop logprobs max_tokens metadata "
    "id logit_bias stop_token_ids ignore_eos min_tokens custom_id method url body role content "
    "top_logprobs max_completion_tokens stream response_format echo best_of user regex "
    "json_schema json_object grammar type x".split()
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([CHAT, COMPLETIONS, "POST", "user", 1, 0.5]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)
OPENAI = st.fixed_dictionaries(
    {
        "custom_id": st.text(max_size=4),
        "method": st.just("POST"),
        "url": st.sampled_from([CHAT, COMPLETIONS]),
        "body": BODIES,
    }
)
LINES = st.one_of(
    st.binary(max_size=60),
    st.text(max_size=60).map(str.encode),
    VALUES.map(json.dumps).map(str.encode),
    BODIES.map(json.dumps).map(str.encode),
    OPENAI.map(json.dumps).map(str.encode),
    st.tuples(OPENAI.map(json.dumps), st.integers(0, 400)).map(
        lambda two: two[0][: two[1]].encode()
    ),
)


@given(LINES)
def test_any_line_is_a_request_or_has_a_record_that_says_why(data: bytes) -> None:
    line = line_of(data)
    try:
        request: LineRequest | LineError = read_request(line, RULES)
    except LineError as error:
        request = error
    if isinstance(request, LineRequest):
        assert isinstance(request.params, SamplingParams)
        assert request.params.seed is not None
    record = to_line(request.form.failed(line.key, str(request)))
    assert key_of(record) == line.key
    assert json.loads(record)["error"]["message"] == str(request) != ""
