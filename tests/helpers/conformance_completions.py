"""Conformance cases of /v1/completions.

Written anew from what llama.cpp's tools/server/tests/unit (test_completion, test_ignore_eos,
test_speculative, test_prompt_cache) and vLLM's tests/entrypoints/openai (test_completion,
test_completion_with_echo, test_guided_decoding) assert.
"""

from __future__ import annotations

import json
import re
from typing import Any

from conformance import ABSENT, NONEMPTY, Case, refused

PATH = "/v1/completions"
Fields = dict[str, Any]


def text(name: str, body: Fields, expect: Fields | None = None, status: int = 200, **more: Any):
    given = {"prompt": "I believe the meaning of life is", "max_tokens": 4, "temperature": 0}
    return Case(f"completion: {name}", PATH, {**given, **body}, status, expect or {}, **more)


def _is_json(actual: str) -> bool:
    return isinstance(json.loads(actual), dict)


def _is_ranked(entry: Fields) -> bool:
    return all(
        item["logprob"] <= 0 and item["rank"] >= 1 and isinstance(item["decoded_token"], str)
        for item in entry.values()
    )


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
CONTENT, REASON = "choices.0.message.content", "choices.0.finish_reason"
IS_OF_SCHEMA = {CONTENT: lambda actual: json.loads(actual).keys() == {"ok"}}
LONG = {"max_tokens": 40}
YES_NO = {"choices.0.text": re.compile("^(yes|no)$")}
PART = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}

COMPLETIONS = [
    text("ends at max_tokens", {}, {"choices.0.finish_reason": "length", "choices.0.text": str}),
    text("object and id", {}, {"object": "text_completion", "id": re.compile("^cmpl-")}),
    text("usage", {}, {"usage.completion_tokens": 4, "usage.total_tokens": int}),
    text(
        "timings of llama.cpp",
        {},
        {"timings.predicted_n": 4, "timings.prompt_ms": float, "timings.cache_n": int},
    ),
    text("n_predict", {"max_tokens": None, "n_predict": 3}, {"usage.completion_tokens": 3}),
    text("max_tokens of -1 is no limit", {"max_tokens": -1, "stop": ["e"]}, {}),
    text("max_tokens beyond the context", {"max_tokens": 10**9, "stop": ["e"]}, {}),
    text("max_tokens of 0", {"max_tokens": 0}, refused("max_tokens", "at least one"), 400),
    text("any model is answered", {"model": "gpt-3.5-turbo-instruct"}, {"model": str}),
    text("tokens as prompt", {"prompt": [5, 6, 7]}, {"usage.prompt_tokens": 3}),
    text("several prompts", {"prompt": ["a b", "c d"]}, {"choices": lambda c: len(c) == 2}),
    text("several prompts of tokens", {"prompt": [[5, 6], [7]]}, {"choices.1.index": 1}),
    text("mixed prompts", {"prompt": [5, "a"]}, {}, reason="one kind of prompt in a request"),
    text("prompt of -1", {"prompt": [-1]}, refused("prompt.0", "at least 0"), 400),
    text("prompt of nothing", {"prompt": []}, refused("prompt", "at least 1"), 400),
    text("no prompt", {"prompt": None}, refused("prompt"), 400),
    text("token beyond the vocabulary", {"prompt": [10**8]}, {"error.message": ...}, 400),
    text("echo", {"echo": True}, {"choices.0.text": re.compile("^I believe the meaning")}),
    text(
        "echo with logprobs",
        {"echo": True, "logprobs": 1},
        {
            "choices.0.logprobs.token_logprobs.0": None,
            "choices.0.logprobs.token_logprobs.1": float,
            "choices.0.logprobs.top_logprobs.0": None,
            "choices.0.logprobs.text_offset.0": 0,
        },
    ),
    text(
        "echo of a prompt alone, with logprobs",
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {
            "choices.0.text": "I believe the meaning of life is",
            "choices.0.logprobs.token_logprobs.1": float,
            "choices.0.finish_reason": "length",
            "usage.completion_tokens": 0,
        },
    ),
    text(
        "a stream of echo with logprobs",
        {"echo": True, "logprobs": 1, "stream": True},
        {"1.choices.0.logprobs.token_logprobs.0": None},
    ),
    text(
        "prompt_logprobs",
        {"prompt_logprobs": 1},
        {"choices.0.prompt_logprobs.0": None, "choices.0.prompt_logprobs.1": _is_ranked},
    ),
    text(
        "prompt_logprobs of 0", {"prompt_logprobs": 0}, {"choices.0.prompt_logprobs.1": _is_ranked}
    ),
    text("no prompt_logprobs unless asked", {}, {"choices.0.prompt_logprobs": ABSENT}),
    text(
        "prompt_logprobs of a stream",
        {"prompt_logprobs": 1, "stream": True},
        refused("prompt_logprobs"),
        400,
    ),
    text("prompt_logprobs of -1", {"prompt_logprobs": -1}, refused("prompt_logprobs"), 400),
    text(
        "best_of with prompt_logprobs",
        {"prompt_logprobs": 1, "best_of": 3},
        refused("best_of"),
        400,
    ),
    text(
        "beams with prompt_logprobs",
        {"prompt_logprobs": 1, "use_beam_search": True},
        refused("use_beam_search"),
        400,
    ),
    text("n", {"n": 2, "temperature": 1}, {"choices": lambda c: len(c) == 2}),
    text("logprobs", {"logprobs": 2}, {"choices.0.logprobs.tokens": lambda t: len(t) == 4}),
    text("n_probs", {"n_probs": 2}, {"choices.0.logprobs.top_logprobs": list}),
    text("logprobs beyond the limit", {"logprobs": 30}, refused("logprobs", "at most 20"), 400),
    text("a stop string", {**LONG, "stop": ["a"]}, {"choices.0.finish_reason": "stop"}),
    text("20 stops", {"stop": ["x"] * 20}, refused("stop", "20 given.* at most 16"), 400),
    text(
        "include_stop_str_in_output",
        {**LONG, "stop": ["a"], "include_stop_str_in_output": True},
        {"choices.0.text": re.compile("a$")},
    ),
    text("suffix is refused", {"suffix": "x"}, refused("suffix"), 400),
    text("an empty suffix is none", {"suffix": ""}),
    text("best_of equal to n", {"best_of": 1}),
    text("best_of", {"best_of": 3}, {}, reason="the server has no search for the best of several"),
    text("ignore_eos", {"ignore_eos": True, "max_tokens": 9}, {"usage.completion_tokens": 9}),
    text("min_tokens", {"min_tokens": 4}, {"usage.completion_tokens": 4}),
    text(
        "cache_prompt off",
        {"cache_prompt": False},
        {"usage.prompt_tokens_details.cached_tokens": 0},
    ),
    text("regex", {**LONG, "guided_regex": "(yes|no)"}, YES_NO),
    text("choice", {**LONG, "guided_choice": ["yes", "no"]}, YES_NO),
    text("structured_outputs", {**LONG, "structured_outputs": {"regex": "(yes|no)"}}, YES_NO),
    text("grammar of llama.cpp", {**LONG, "grammar": 'root ::= "yes" | "no"'}, YES_NO),
    text("a broken grammar", {"grammar": "root ::= ("}, {"error.message": ...}, 400),
    text("json_schema", {**LONG, "json_schema": SCHEMA}, {"choices.0.text": _is_json}),
    text("two constraints", {"grammar": "a", "guided_regex": "b"}, refused("grammar"), 400),
    text("a stream", {"stream": True}, {"-1": "[DONE]", "-2.choices.0.finish_reason": "length"}),
    text(
        "usage of a stream",
        {"stream": True, "stream_options": {"include_usage": True}},
        {"-2.choices": [], "-2.usage.completion_tokens": 4},
    ),
    text("no usage unless asked", {"stream": True}, {"-2.usage": ABSENT}),
    text("timings_per_token", {"stream": True, "timings_per_token": True}, {"0.timings": dict}),
    text(
        "return_progress",
        {"stream": True, "return_progress": True},
        {
            "0.prompt_progress.total": int,
            "0.prompt_progress.cache": int,
            "0.prompt_progress.processed": int,
            "0.prompt_progress.time_ms": float,
        },
    ),
    text("no progress unless asked", {"stream": True}, {"0.prompt_progress": ABSENT}),
    text("unused llama.cpp options", {"id_slot": 0, "n_keep": 5, "mirostat": 0, "samplers": []}),
    text("mirostat", {"mirostat": 2}, refused("mirostat"), 400),
    text("typical_p, min_p, top_k", {"temperature": 1, "typical_p": 0.9, "min_p": 0.1, "top_k": 5}),
    text("repeat_penalty", {"repeat_penalty": 1.1, "repeat_last_n": -1}),
    text(
        "a window of the penalty",
        {"repeat_penalty": 1.1, "repeat_last_n": 64},
        refused("repeat_last_n"),
        400,
    ),
    text("logit_bias forces", {"logit_bias": {"300": 100}}, {"choices.0.text": NONEMPTY}),
    text("logit_bias as a list", {"logit_bias": [[300, 100.0]]}, {"choices.0.text": NONEMPTY}),
    text("logit_bias of a text", {"logit_bias": [["a", -50]]}),
    text("logit_bias bans", {"logit_bias": [["a", False], [9, False]]}),
    text("logit_bias beyond the vocabulary", {"logit_bias": {"99999999": 1}}, status=400),
    text(
        "stop_token_ids",
        {"logit_bias": {"9": 100}, "stop_token_ids": [9]},
        {"choices.0.finish_reason": "stop"},
    ),
    text("drafts are counted", LONG, {"timings.draft_n": int, "timings.draft_n_accepted": int}),
]
