"""OpenAI's own client against a server in a subprocess."""

from __future__ import annotations

from typing import Any

import pytest
from serving import Server

openai = pytest.importorskip("openai")

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "tiny", "messages": TALK, "max_tokens": 8, "temperature": 0, **options}
    return client.chat.completions.create(**given)


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "specdec")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_a_chat(client: Any) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    usage = answer.usage
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8
    details = usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0  # the draft is the target itself
    assert answer.timings["draft_n_accepted"] == details.accepted_prediction_tokens
    assert chat(client).choices[0].message.content == choice.message.content


def test_a_chat_as_a_stream(client: Any) -> None:
    whole = chat(client, max_tokens=20)
    stream = chat(client, max_tokens=20, stream=True, stream_options={"include_usage": True})
    events = list(stream)
    assert {event.object for event in events} == {"chat.completion.chunk"}
    assert len({event.id for event in events}) == 1
    assert events[0].choices[0].delta.role == "assistant"
    text = "".join(event.choices[0].delta.content or "" for event in events[:-1])
    assert text == whole.choices[0].message.content
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-1].choices == []
    assert events[-1].usage.completion_tokens == 20


def test_events_with_running_metrics(client: Any) -> None:
    """llama.cpp's field; the page shows the numbers while the text arrives."""
    stream = chat(client, max_tokens=40, stream=True, extra_body={"timings_per_token": True})
    received = [event.timings for event in stream if hasattr(event, "timings")]
    assert len(received) > 3
    for before, after in zip(received, received[1:], strict=False):
        assert before["passes"] <= after["passes"]
        assert before["draft_n_accepted"] <= after["draft_n_accepted"]
    assert received[-1]["predicted_n"] == 40
    assert all(not hasattr(event, "timings") for event in chat(client, stream=True))


def test_progress_of_a_prompt(client: Any) -> None:
    """llama.cpp's field; the page shows it."""
    talk = [{"role": "user", "content": "A prompt of its own, of more than one block. " * 6}]
    options = {"messages": talk, "max_tokens": 4}
    stream = list(chat(client, **options, stream=True, extra_body={"return_progress": True}))
    received = [event.prompt_progress for event in stream if hasattr(event, "prompt_progress")]
    num_tokens = chat(client, **options).usage.prompt_tokens
    assert [part["total"] for part in received] == [num_tokens] * len(received)
    assert received[0]["processed"] == received[0]["cache"] < num_tokens
    assert received[-1]["processed"] == num_tokens
    assert received[0]["time_ms"] <= received[-1]["time_ms"]
    first_text = next(i for i, event in enumerate(stream) if event.choices[0].delta.content)
    assert hasattr(stream[first_text - 1], "prompt_progress"), "before the text"


def test_timings_are_those_of_llama_cpp(client: Any) -> None:
    talk = [{"role": "user", "content": "Asked twice, and found in the cache the second time."}]
    chat(client, messages=talk, max_tokens=8)
    answer = chat(client, messages=talk, max_tokens=8)
    timings = answer.timings
    assert timings["cache_n"] == answer.usage.prompt_tokens_details.cached_tokens > 0
    assert timings["prompt_n"] + timings["cache_n"] == answer.usage.prompt_tokens
    per_token = timings["prompt_per_token_ms"]
    assert per_token == pytest.approx(timings["prompt_ms"] / timings["prompt_n"])
    assert timings["prompt_per_second"] == pytest.approx(1000 / per_token)
    assert timings["predicted_per_token_ms"] == pytest.approx(timings["predicted_ms"] / 7)
    assert timings["predicted_per_second"] == pytest.approx(7000 / timings["predicted_ms"])


def test_only_an_assistants_message_may_lack_content(client: Any) -> None:
    for role in ("user", "system"):
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\] has no content"):
            chat(client, messages=[{"role": role}])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert chat(client, messages=[*TALK, {"role": "assistant", "tool_calls": [call]}]).choices


def test_several_sequences_of_one_seed(client: Any) -> None:
    options = {"temperature": 1.0, "seed": 7, "n": 3}
    strings = [choice.message.content for choice in chat(client, **options).choices]
    assert len(set(strings)) == 3
    again = chat(client, **options, stream=True)
    streamed = {0: "", 1: "", 2: ""}
    for event in again:
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == strings
    assert chat(client, **{**options, "n": 1, "seed": -5}).choices[0].message.content


def test_equal_outputs_without_randomness(client: Any) -> None:
    answer = chat(client, n=2)
    first, second = answer.choices
    assert first.message.content == second.message.content
    assert (first.index, second.index) == (0, 1)
    assert answer.usage.completion_tokens == 16
    events = list(chat(client, n=2, stream=True))
    assert {choice.index for event in events for choice in event.choices} == {0, 1}


def test_an_output_ends_before_a_stop(client: Any) -> None:
    whole = chat(client, max_tokens=30).choices[0].message.content
    stop = whole[5:7]
    choice = chat(client, max_tokens=30, stop=[stop]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_log_probabilities(client: Any) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for item in content:
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.token.encode() == bytes(item.bytes) or item.token.startswith("bytes:\\x")
    joined = b"".join(bytes(item.bytes) for item in content)
    assert joined.decode(errors="replace") == answer.choices[0].message.content
    assert content[0].top_logprobs[0].logprob == content[0].logprob  # greedy
    streamed = [
        item
        for event in chat(client, logprobs=True, top_logprobs=3, stream=True)
        for choice in event.choices
        if choice.logprobs
        for item in choice.logprobs.content
    ]
    assert streamed == content
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="tiny", prompt="def ", max_tokens=6, temperature=0)
    assert answer.object == "text_completion"
    assert answer.usage.completion_tokens == 6
    text = answer.choices[0].text
    for prompt in ([103, 104, 105], ["def ", "abc"], [[103, 104], [105]]):
        several = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, temperature=0, echo=True, n=2
        )
        n_prompts = 1 if isinstance(prompt[0], int) else len(prompt)
        assert [choice.index for choice in several.choices] == list(range(2 * n_prompts))
        assert several.choices[0].text == several.choices[1].text
    stream = client.completions.create(
        model="tiny", prompt=["def ", "abc"], max_tokens=6, temperature=0, stream=True
    )
    strings = ["", ""]
    for event in stream:
        for choice in event.choices:
            strings[choice.index] += choice.text
    assert strings[0] == text


def test_several_prompts_of_a_stream_come_together(client: Any) -> None:
    stream = client.completions.create(
        model="tiny", prompt=["def ", "abc"], max_tokens=60, temperature=0.8, seed=1, stream=True
    )
    order = [choice.index for event in stream for choice in event.choices]
    assert set(order) == {0, 1}
    assert order != sorted(order), "one after the other"


def test_log_probabilities_of_completions(client: Any) -> None:
    options = {"model": "tiny", "prompt": "x", "max_tokens": 5, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.text_offset) == 5
    assert all(len(top) >= 1 for top in whole.top_logprobs)
    offsets: list[int] = []
    for event in client.completions.create(**options, stream=True):
        for choice in event.choices:
            offsets += choice.logprobs.text_offset if choice.logprobs else []
    assert offsets == whole.text_offset


def test_options_that_only_others_have(client: Any) -> None:
    sampled = {"temperature": 1.0, "seed": 3}
    free = chat(client, **sampled).choices[0].message.content
    likeliest = chat(client, **sampled, extra_body={"top_k": 1}).choices[0].message.content
    assert likeliest == chat(client).choices[0].message.content != free
    chat(client, extra_body={"min_p": 0.1, "top_k": -1, "repetition_penalty": 1.2})


def test_the_most_tokens_by_their_newer_name(client: Any) -> None:
    options = {"model": "tiny", "messages": TALK, "temperature": 0}
    answer = client.chat.completions.create(**options, max_completion_tokens=3)
    assert answer.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is 0") as caught:
        client.chat.completions.create(**options, max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"


def test_a_length_beyond_the_limits_is_clamped(client: Any) -> None:
    stop = chat(client).choices[0].message.content[2]
    for length in (10**9, -1):
        assert chat(client, max_tokens=length, stop=[stop]).choices[0].finish_reason == "stop"


def test_the_likeliest_tokens_alone(client: Any) -> None:
    likeliest = chat(client).choices[0].message.content
    narrow = chat(client, temperature=1.0, seed=3, top_p=1e-6, extra_body={"priority": 5})
    assert narrow.choices[0].message.content == likeliest


def test_penalties_and_biases(client: Any) -> None:
    assert chat(client, logit_bias={"70": 100}, max_tokens=3).choices[0].message.content == "ddd"
    plain = chat(client, max_tokens=40).choices[0].message.content
    other = chat(client, max_tokens=40, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(other.choices[0].message.content)) > len(set(plain))


def test_a_conversation_with_tools(client: Any) -> None:
    """Tools reach the template; an untrained model's answer is plain text."""
    without = chat(client).usage.prompt_tokens
    answer = chat(client, tools=[TOOL], tool_choice="auto")
    assert answer.usage.prompt_tokens == without + len("tools: 1\n")
    assert answer.choices[0].message.tool_calls is None
    assert chat(client, tools=[TOOL], tool_choice="none").usage.prompt_tokens == without
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"a": "12345"}'}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    added = chat(client, messages=talk, tools=[TOOL]).usage.prompt_tokens
    assert added == answer.usage.prompt_tokens + len('assistant: add{"a": "12345"}tool: 3')


def test_an_answer_goes_back_as_a_message(client: Any) -> None:
    message = chat(client).choices[0].message
    assert chat(client, messages=[*TALK, message, TALK[1]]).choices


def test_text_in_parts(client: Any) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answer = chat(client, messages=[{"role": "user", "content": parts}])
    alone = chat(client, messages=[{"role": "user", "content": "h\ni"}])
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 10**9}, "sequences"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0.00001}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ["x" * 1000]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "context"),
        ({"extra_body": {"max_token": 1}}, "max_token"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ],
)
def test_what_is_wrong_is_named(client: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert named in caught.value.message
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert caught.value.type == "invalid_request_error"


def test_the_same_before_a_stream(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="leaves no room") as caught:
        chat(client, messages=[{"role": "user", "content": "x" * 600}], stream=True)
    assert caught.value.code == "context_length_exceeded"


def test_another_models_name_is_answered(client: Any) -> None:
    assert chat(client, model="gpt-4o").model == "tiny"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_nothing_is_fetched(client: Any, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/x"}}
    with pytest.raises(openai.BadRequestError, match="fetches nothing"):
        chat(client, messages=[{"role": "user", "content": [part]}])


def test_an_echoed_prompt_has_its_log_probabilities(client: Any) -> None:
    """A program that scores texts sends them whole, and asks for no new token."""
    options = {"model": "tiny", "temperature": 0, "logprobs": 2, "echo": True}
    (whole,) = client.completions.create(prompt="a é b", max_tokens=3, **options).choices
    shown = whole.logprobs
    assert shown.token_logprobs[0] is shown.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in shown.token_logprobs[1:])
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.text_offset)
    ends = [*shown.text_offset[1:], len(whole.text)]
    for token, start, end in zip(shown.tokens, shown.text_offset, ends, strict=True):
        assert token.startswith("bytes:") or whole.text[start:end] == token
    num_prompt = len(shown.tokens) - 3
    (alone,) = client.completions.create(prompt="a é b", max_tokens=0, **options).choices
    assert alone.text == "a é b"
    assert alone.logprobs.token_logprobs == shown.token_logprobs[:num_prompt]
    assert alone.logprobs.top_logprobs == shown.top_logprobs[:num_prompt]
    parts = [
        event.choices[0].logprobs
        for event in client.completions.create(prompt="a é b", max_tokens=3, stream=True, **options)
        if event.choices[0].logprobs
    ]
    assert [x for part in parts for x in part.token_logprobs] == shown.token_logprobs
    assert [x for part in parts for x in part.text_offset] == shown.text_offset


def test_prompt_logprobs_of_every_choice_and_prompt(client: Any) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt=["ab", "cde"],
        n=2,
        max_tokens=2,
        temperature=1,
        seed=1,
        extra_body={"prompt_logprobs": 2},
    )
    given = [choice.model_extra["prompt_logprobs"] for choice in answer.choices]
    assert [len(entries) for entries in given] == [2, 2, 3, 3]
    assert given[0] == given[1]
    first, *scored = given[2]
    assert first is None
    for entries in scored:
        assert sorted(entry["rank"] for entry in entries.values())[:2] == [1, 2]
        assert all(entry["decoded_token"] for entry in entries.values())
    whole = chat(client, extra_body={"prompt_logprobs": 0})
    assert len(whole.model_extra["prompt_logprobs"]) == whole.usage.prompt_tokens


def test_too_many_log_probabilities_of_a_prompt(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 20000") as caught:
        client.completions.create(
            model="tiny", prompt="x" * 450, n=8, max_tokens=1, extra_body={"prompt_logprobs": 20}
        )
    assert caught.value.param == "prompt_logprobs"


def test_tokens_of_a_completion(client: Any) -> None:
    """No likely token is lost, and the offsets are those of the text."""
    answer = client.completions.create(
        model="tiny", prompt="é", max_tokens=30, temperature=1, seed=1, logprobs=5
    )
    (choice,) = answer.choices
    actual = choice.logprobs
    ends = [*actual.text_offset[1:], len(choice.text)]
    for token, start, end, top in zip(
        actual.tokens, actual.text_offset, ends, actual.top_logprobs, strict=True
    ):
        assert token in top
        assert len(top) in (5, 6)
        assert token.startswith(("bytes:\\x", "<")) or choice.text[start:end] == token
