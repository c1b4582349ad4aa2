"""Answers that no tiny model writes: tool calls, found in made-up output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from serving import Server
from tiny_pair import save_model

from specdec.async_llm import AsyncChunk
from specdec.dialogue.formats import OutputFormat
from specdec.dialogue.schemas import ArgumentTypes
from specdec.dialogue.thinking_formats import THINKING_FORMATS
from specdec.dialogue.tool_formats import HERMES
from specdec.engine.sequences.outputs import CompletionOutput, GenerationResult
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams
from specdec.serve.api.answer import Answer
from specdec.serve.api.messages_answer import MessagesAnswer
from specdec.serve.api.ollama_answer import OllamaChatAnswer
from specdec.serve.api.openai_answers import ChatAnswer, CompletionAnswer
from specdec.serve.api.responses import ResponsesRequest
from specdec.serve.api.responses_answer import ResponsesAnswer
from specdec.serve.errors import bad_request
from specdec.serve.events import End, Failure
from specdec.serve.jobs import Job
from specdec.serve.outputs import OutputEvents
from specdec.serve.parsers import output_parser
from specdec.serve.responses import ResponseModel

THINK = next(form for form in THINKING_FORMATS if form.name == "think")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Letters:
    """A tokenizer whose tokens are characters."""

    n_tokens = 0x110000
    added_tokens: Mapping[str, Any] = {}

    def encode(self, text: str) -> list[int]:
        return [ord(item) for item in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_name(self, token_id: int) -> str:
        return chr(token_id)


def result(text: str, reason: str = "stop", **more: Any) -> GenerationResult:
    output = CompletionOutput(text, tuple(map(ord, text)), reason, **more)
    stats = GenerationStats(prompt_tokens=3, generated_tokens=len(text), drafted_tokens=9)
    return GenerationResult((output,), stats)


def job(tools: tuple[str, ...] = (), max_calls: int | None = None, **more: Any) -> Job:
    types = ArgumentTypes([{"function": {"name": name}} for name in tools])
    form = OutputFormat(HERMES, types=types, max_calls=max_calls) if tools else None
    return Job(([1, 2, 3],), SamplingParams(), form=form, **more)


def sent(response: ResponseModel) -> dict[str, Any]:
    """Return the JSON that a client gets."""
    return json.loads(response.to_json())


def whole(kind: type[Answer], job: Job, actual: GenerationResult) -> dict[str, Any]:
    """Return a whole answer as a client gets it."""
    events = OutputEvents(job, Letters(), lambda: output_parser(job, Letters()), lambda: [actual])
    return sent(kind("m", job.head, RESPONSES).whole(events.whole(), events.usage))


def frames(kind: type[Answer], job: Job, actual: GenerationResult, size: int) -> list[Any]:
    """Return all events of an output that came in chunks, as a client gets them."""
    events = OutputEvents(job, Letters(), lambda: output_parser(job, Letters()), lambda: [actual])
    answer, text = kind("m", job.head, RESPONSES), actual.text
    made = list(answer.begin())
    for i in range(0, len(text), size):
        read_chunk = text[i : i + size]
        made += answer.write(events.step(AsyncChunk(read_chunk, tuple(map(ord, read_chunk))), 0))
    for event in events.finish(actual.outputs[0], 0):
        made += answer.write(event)
    return [sent(frame) for frame in [*made, *answer.write(End(events.usage))]]


def choices_of(text: str, size: int, **more: Any) -> list[dict[str, Any]]:
    """Return the choices of all events of a chat's output that came in chunks."""
    return [event["choices"][0] for event in frames(ChatAnswer, job(**more), result(text), size)]


def test_calls_of_a_whole_answer() -> None:
    text = f"Wait.\n{CALL}{CALL}"
    answer = whole(ChatAnswer, job(tools=("add",)), result(text))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    for call in choice["message"]["tool_calls"]:
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
    item = whole(ChatAnswer, job(tools=("add",), max_calls=1), result(text))
    assert len(item["choices"][0]["message"]["tool_calls"]) == 1


def test_reasoning_is_told_apart_and_counted() -> None:
    form = OutputFormat(HERMES, THINK, begins_in="reasoning", types=ArgumentTypes())
    asked = Job(([1],), SamplingParams(), form=form)
    for text in (f"Hm.\n</think>\n\nYes.{CALL}", f"Hm.</think>{CALL}"):
        answer = whole(ChatAnswer, asked, result(text))
        (choice,), usage = answer["choices"], answer["usage"]
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"] == "Hm."
        assert message["content"] == ("Yes." if "Yes" in text else None)
        assert choice["finish_reason"] == "tool_calls"
        n_reasoning = text.index("</think>") + len("</think>")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == n_reasoning
        deltas = [
            event["choices"][0]["delta"]
            for event in frames(ChatAnswer, asked, result(text), 2)
            if event["choices"]
        ]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."


def test_a_cut_call_is_told_and_left_out() -> None:
    text = CALL + '<tool_call>{"name": "add", "arguments": {"a": 1'
    for reason, expected in (("length", "length"), ("stop", "tool_calls")):
        answer = whole(ChatAnswer, job(tools=("add",)), result(text, reason))
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == expected
        assert "cut off" in choice["finish_note"]
        assert choice["message"]["content"] is None
        assert len(choice["message"]["tool_calls"]) == 1
        last = frames(ChatAnswer, job(tools=("add",)), result(text, reason), 5)[-1]["choices"][0]
        assert (last["finish_reason"], "cut off" in last["finish_note"]) == (expected, True)
    only = whole(ChatAnswer, job(tools=("add",)), result('<tool_call>{"name": "add"'))
    assert only["choices"][0]["finish_reason"] == "stop"
    assert "tool_calls" not in only["choices"][0]["message"]


def test_without_tools_a_call_is_text() -> None:
    answer = whole(ChatAnswer, job(), result(CALL))
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_of_a_stream(size: int) -> None:
    choices = choices_of(f"Wait.\n{CALL}", size, tools=("add",))
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Wait."
    begin, *more = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (begin["index"], begin["type"], begin["function"]["name"]) == (0, "function", "add")
    joined = "".join(call["function"]["arguments"] for call in [begin, *more])
    assert json.loads(joined) == {"a": 1}
    assert all(call.keys() == {"index", "function"} for call in more)
    assert choices[-1] == {
        "index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_that_only_looks_like_a_call(size: int) -> None:
    text = '{"name": "rm"} <tool'
    choices = choices_of(text, size, tools=("add",))
    assert "".join(choice["delta"].get("content", "") for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"


def test_usage_counts_each_of_equal_outputs() -> None:
    usage = whole(ChatAnswer, job(n_copies=2), result("abcd"))["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == 11
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 9


def test_a_probability_of_nothing_is_a_number() -> None:
    """JSON has no infinity."""
    nothing = {"logprobs": (float("-inf"),), "top_logprobs": ({97: float("-inf")},)}
    chat = whole(ChatAnswer, job(), result("a", **nothing))
    assert chat["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    plain = whole(CompletionAnswer, job(has_chat_logprobs=False), result("a", **nothing))
    assert plain["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -9999.0}]


def test_a_cut_by_the_context_is_reported() -> None:
    cut = result("ab", "length", finish_note="the context")
    for kind in (ChatAnswer, CompletionAnswer):
        (choice,) = whole(kind, job(), cut)["choices"]
        assert (choice["finish_reason"], choice["finish_note"]) == ("length", "the context")
        last = frames(kind, job(), cut, 1)[-1]
        assert last["choices"][0]["finish_note"] == "the context"
        assert "finish_note" not in whole(kind, job(), result("ab"))["choices"][0]


def test_offsets_of_a_stream_go_on() -> None:
    asked = job(n_copies=2, has_chat_logprobs=False)
    events = OutputEvents(asked, Letters(), lambda: output_parser(asked, Letters()), list)
    answer = CompletionAnswer("m", asked.head)
    for choice in (1, 0):
        actual = []
        for read_chunk in ("aé", "中b"):
            ids = tuple(map(ord, read_chunk))
            step = events.step(AsyncChunk(read_chunk, ids, logprobs=(0.0, 0.0)), choice)
            (event,) = answer.write(step)
            actual += sent(event)["choices"][0]["logprobs"]["text_offset"]
        assert actual == [0, 1, 2, 3]


RESPONSES = ResponsesRequest(input="hi")


def test_a_call_in_every_shape() -> None:
    actual, tools = result(f"Wait.\n{CALL}"), {"tools": ("add",)}
    response = whole(ResponsesAnswer, job(**tools), actual)
    message, call = response["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call", "add", {"a": 1}
    )  # fmt: skip
    message = whole(MessagesAnswer, job(**tools), actual)
    text, call = message["content"]
    assert (text["text"], call["name"], call["input"]) == ("Wait.", "add", {"a": 1})
    assert message["stop_reason"] == "tool_use"
    message = whole(OllamaChatAnswer, job(**tools), actual)["message"]
    assert message["content"] == "Wait."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_streamed_call_in_every_shape(size: int) -> None:
    actual, tools = result(f"Wait.\n{CALL}"), {"tools": ("add",)}
    events = frames(ResponsesAnswer, job(**tools), actual, size)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert [item["type"] for item in done] == ["message", "function_call"]
    pieces = [event for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(event["delta"] for event in pieces) == done[1]["arguments"]
    events = frames(MessagesAnswer, job(**tools), actual, size)
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1]
    lines = frames(OllamaChatAnswer, job(**tools), actual, size)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert calls[0]["function"]["arguments"] == {"a": 1}


def test_a_stop_string_can_be_a_part_of_the_text() -> None:
    ended = result("ab", stop="END")
    assert whole(ChatAnswer, job(), ended)["choices"][0]["message"]["content"] == "ab"
    message = whole(ChatAnswer, job(includes_stop=True), ended)["choices"][0]["message"]
    assert message["content"] == "abEND"
    answer = whole(MessagesAnswer, job(), ended)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")


def test_a_failure_has_the_shape_of_its_api() -> None:
    failure = Failure(bad_request("no"))
    head = job().head
    last = {kind: [sent(f) for f in kind("m", head, RESPONSES).write(failure)][-1] for kind in (
        ChatAnswer, ResponsesAnswer, MessagesAnswer, OllamaChatAnswer
    )}  # fmt: skip
    assert last[ChatAnswer]["error"]["message"] == "no"
    assert (last[ResponsesAnswer]["type"], last[ResponsesAnswer]["message"]) == ("error", "no")
    assert last[MessagesAnswer]["error"] == {"type": "invalid_request_error", "message": "no"}
    assert last[OllamaChatAnswer] == {"error": "no"}


def test_a_budget_ends_the_reasoning(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=0)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    (model / "chat_template.jinja").write_text(template)
    body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 48, "temperature": 0}
    anthropic = {"type": "enabled", "budget_tokens": 8}
    with Server(model, "--spec-type", "none", "-c", "256") as server:
        server.ready()
        for fields in ({"thinking_budget_tokens": 8}, {"thinking_token_budget": 8}):
            _, answer = server.post("/v1/chat/completions", {**body, **fields, "ignore_eos": True})
            assert answer["choices"][0]["message"]["content"]
            n_reasoning = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 8 < n_reasoning < 32, "some of the tag's tokens, and the rest of a character"
        _, answer = server.post("/v1/messages", {**body, "thinking": anthropic, "ignore_eos": True})
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        _, answer = server.post("/v1/chat/completions", {**body, "ignore_eos": True})
        assert answer["choices"][0]["message"]["content"] == ""
