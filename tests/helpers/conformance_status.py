"""Conformance cases of routes without a generation, as in llama.cpp's test_basic, test_tokenize and
test_template and vLLM's test_tokenization, and of Ollama's API."""

from __future__ import annotations

import re

from conformance import HI, NONEMPTY, Case
from conformance_tools import PARAMETERS, TOOL

STATUS = [
    Case("health", "/health", None, 200, {"status": "ready"}),
    Case("models", "/v1/models", None, 200, {"object": "list", "data.0.object": "model"}),
    Case("another model", "/v1/models/other", None, 404, {"error.code": "model_not_found"}),
    Case(
        "props",
        "/props",
        None,
        200,
        {"total_slots": int, "default_generation_settings.n_ctx": 512, "chat_template": str},
    ),
    Case("an unknown route", "/v1/nothing", None, 404, {"error.message": str}),
    Case("metrics", "/metrics", None, 200, {"": re.compile("specdec_prompt_tokens")}),
    Case("tokenize", "/tokenize", {"content": "hi you"}, 200, {"tokens": list, "count": int}),
    Case("tokenize nothing", "/tokenize", {"content": ""}, 200, {"tokens": []}),
    Case(
        "tokenize with pieces",
        "/tokenize",
        {"content": "hi", "with_pieces": True},
        200,
        {"tokens.0.id": int, "tokens.0.piece": ...},
    ),
    Case(
        "tokenize as vLLM",
        "/tokenize",
        {"prompt": "hi", "model": "m"},
        200,
        {"count": int, "max_model_len": 512},
    ),
    Case("tokenize messages", "/tokenize", {"messages": HI}, 200, {"count": lambda n: n > 3}),
    Case(
        "tokenize strings",
        "/tokenize",
        {"prompt": "hi", "return_token_strs": True},
        200,
        {"token_strs.0": str},
    ),
    Case("tokenize without a text", "/tokenize", {}, 400, {"error.param": "content"}),
    Case("detokenize", "/detokenize", {"tokens": [9, 10]}, 200, {"content": str, "prompt": str}),
    Case(
        "detokenize an unknown token",
        "/detokenize",
        {"tokens": [10**8]},
        400,
        {"error.param": "tokens.0"},
    ),
    Case(
        "apply-template", "/apply-template", {"messages": HI}, 200, {"prompt": re.compile("Say hi")}
    ),
    Case(
        "apply-template open",
        "/apply-template",
        {"messages": [*HI, {"role": "assistant", "content": "Well "}]},
        200,
        {"prompt": re.compile("Well $")},
    ),
    Case(
        "apply-template closed",
        "/apply-template",
        {"messages": HI, "add_generation_prompt": False},
        200,
        {"prompt": re.compile(r"Say hi\.(?!(?s:.)*assistant)")},
    ),
    Case("ollama: tags", "/api/tags", None, 200, {"models.0.name": NONEMPTY}),
    Case("ollama: ps", "/api/ps", None, 200, {"models.0.expires_at": NONEMPTY}),
    Case("ollama: version", "/api/version", None, 200, {"version": NONEMPTY}),
    Case("ollama: show", "/api/show", {"model": "m"}, 200, {"capabilities.0": "completion"}),
    Case(
        "ollama: chat",
        "/api/chat",
        {"messages": HI, "stream": False, "options": {"num_predict": 4}},
        200,
        {"done": True, "done_reason": "length", "message.content": NONEMPTY, "eval_count": 4},
    ),
    Case(
        "ollama: a stream",
        "/api/chat",
        {"messages": HI, "options": {"num_predict": 4}},
        200,
        {"0.done": False, "-1.done": True, "-1.eval_count": 4},
    ),
    Case(
        "ollama: think",
        "/api/chat",
        {"messages": HI, "think": False, "options": {"num_predict": 2, "num_ctx": 4096}},
    ),
    Case(
        "ollama: a format",
        "/api/chat",
        {"messages": HI, "stream": False, "format": PARAMETERS, "options": {"num_predict": 60}},
        200,
        {"message.content": re.compile("city")},
    ),
    Case(
        "ollama: tools",
        "/api/chat",
        {"messages": HI, "stream": False, "tools": [TOOL], "options": {"num_predict": 2}},
        200,
        {"message.role": "assistant"},
    ),
    Case("ollama: load", "/api/chat", {"model": "m"}, 200, {"0.done_reason": "load"}),
    Case(
        "ollama: generate",
        "/api/generate",
        {"prompt": "hi", "stream": False, "system": "Be brief.", "options": {"num_predict": 3}},
        200,
        {"response": NONEMPTY, "eval_count": 3},
    ),
    Case(
        "ollama: generate raw",
        "/api/generate",
        {"prompt": "def f(", "raw": True, "options": {"num_predict": 3}},
        200,
        {"-1.done": True},
    ),
    Case(
        "ollama: an image",
        "/api/generate",
        {"prompt": "x", "images": ["aGk="]},
        400,
        {"error": re.compile("images")},
    ),
    Case("ollama: an error", "/api/chat", {"messages": 1}, 400, {"error": str}),
]
