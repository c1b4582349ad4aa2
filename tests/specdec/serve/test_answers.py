"""Answers that no tiny model writes: tool calls, found in made-up output."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from specdec.async_llm import AsyncChunk
from specdec.engine.outputs import CompletionOutput, GenerationResult
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams
from specdec.serve.answers import ChatAnswer, CompletionAnswer
from specdec.serve.jobs import Job
from specdec.serve.responses import ResponseModel

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


class Letters:
    """A tokenizer whose tokens are characters."""

    n_tokens = 0x110000

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


def job(**more: Any) -> Job:
    return Job(([1, 2, 3],), SamplingParams(), **more)


def sent(response: ResponseModel) -> dict[str, Any]:
    """Return the JSON that a client gets."""
    return json.loads(response.to_json())


def choices_of(text: str, size: int, **more: Any) -> list[dict[str, Any]]:
    """Return the choices of all events of an output that came in chunks."""
    answer = ChatAnswer("m", job(**more), Letters())
    events = list(answer.first_events())
    for i in range(0, len(text), size):
        read_chunk = text[i : i + size]
        events += answer.events(AsyncChunk(read_chunk, tuple(map(ord, read_chunk))), 0)
    events += answer.last_events(result(text).outputs[0], 0)
    return [sent(event)["choices"][0] for event in events]


def test_calls_of_a_whole_answer() -> None:
    text = f"Wait.\n{CALL}{CALL}"
    answer = sent(ChatAnswer("m", job(tools=("add",)), Letters()).whole([result(text)]))
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Wait."
    for call in choice["message"]["tool_calls"]:
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
    item = sent(ChatAnswer("m", job(tools=("add",), max_calls=1), Letters()).whole([result(text)]))
    assert len(item["choices"][0]["message"]["tool_calls"]) == 1


def test_without_tools_a_call_is_text() -> None:
    answer = sent(ChatAnswer("m", job(), Letters()).whole([result(CALL)]))
    assert answer["choices"][0]["message"]["content"] == CALL
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_of_a_stream(size: int) -> None:
    choices = choices_of(f"Wait.\n{CALL}", size, tools=("add",))
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Wait."
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert (call["index"], call["function"]["name"]) == (0, "add")
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
    usage = sent(ChatAnswer("m", job(n_copies=2), Letters()).whole([result("abcd")]))["usage"]
    assert usage["prompt_tokens"] == 3
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == 11
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == 9


def test_a_probability_of_nothing_is_a_number() -> None:
    """JSON has no infinity."""
    nothing = {"logprobs": (float("-inf"),), "top_logprobs": ({97: float("-inf")},)}
    chat = sent(ChatAnswer("m", job(), Letters()).whole([result("a", **nothing)]))
    assert chat["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    plain = sent(CompletionAnswer("m", job(), Letters()).whole([result("a", **nothing)]))
    assert plain["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -9999.0}]


def test_a_cut_by_the_context_is_reported() -> None:
    cut = result("ab", "length", finish_note="the context")
    for answer in (ChatAnswer("m", job(), Letters()), CompletionAnswer("m", job(), Letters())):
        (choice,) = sent(answer.whole([cut]))["choices"]
        assert (choice["finish_reason"], choice["finish_note"]) == ("length", "the context")
        (event,) = answer.last_events(cut.outputs[0], 0)
        assert sent(event)["choices"][0]["finish_note"] == "the context"
        assert "finish_note" not in sent(answer.whole([result("ab")]))["choices"][0]


def test_offsets_of_a_stream_go_on() -> None:
    answer = CompletionAnswer("m", job(n_copies=2), Letters())
    for choice in (1, 0):
        actual = []
        for read_chunk in ("aé", "中b"):
            ids = tuple(map(ord, read_chunk))
            (event,) = answer.events(AsyncChunk(read_chunk, ids, logprobs=(0.0, 0.0)), choice)
            actual += sent(event)["choices"][0]["logprobs"]["text_offset"]
        assert actual == [0, 1, 2, 3]
