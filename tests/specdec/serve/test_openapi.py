"""The server's answers match its /openapi.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
from serving import Server

jsonschema = pytest.importorskip("jsonschema")

TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"prompt": "hi", "max_tokens": 3}
OLLAMA = {"stream": False, "options": {"num_predict": 3}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [
    ("get", "/health", None),
    ("get", "/v1/models", None),
    ("get", "/v1/models/tiny", None),
    ("get", "/v1/models/other", None),
    ("post", CHAT, TALK),
    ("post", CHAT, {**TALK, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("post", CHAT, {**TALK, "n": 0}),
    ("post", COMPLETIONS, TEXT),
    ("post", COMPLETIONS, {**TEXT, "logprobs": 0}),
    ("post", COMPLETIONS, {**TEXT, "logprobs": 2, "temperature": 0, "n": 2}),
    ("post", COMPLETIONS, {**TEXT, "stop": []}),
    ("post", COMPLETIONS, {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 2}),
    ("post", CHAT, {**TALK, "prompt_logprobs": 2}),
    ("post", COMPLETIONS, {"prompt": []}),
    ("get", "/props", None),
    ("get", "/v1/budget", None),
    ("post", "/v1/budget", {"memory_budget": "auto"}),
    ("post", "/v1/budget", {"memory_budget": []}),
    ("get", "/api/tags", None),
    ("get", "/api/ps", None),
    ("get", "/api/version", None),
    ("post", "/api/show", {"model": "tiny"}),
    ("post", "/v1/responses", {"input": "hi", "max_output_tokens": 3}),
    ("post", "/v1/responses", {"input": 1}),
    ("post", "/v1/messages", TALK),
    ("post", "/v1/messages", {"messages": []}),
    ("post", "/v1/messages/count_tokens", TALK),
    ("post", "/api/chat", {**OLLAMA, "messages": TALK["messages"]}),
    ("post", "/api/chat", {**OLLAMA, "messages": []}),
    ("post", "/api/chat", {"messages": 1}),
    ("post", "/api/generate", {**OLLAMA, "prompt": "hi"}),
    ("post", "/api/generate", {**OLLAMA, "prompt": "hi", "raw": True}),
    ("post", "/tokenize", {"content": "hi"}),
    ("post", "/tokenize", {"prompt": "hi", "with_pieces": True, "return_token_strs": True}),
    ("post", "/detokenize", {"tokens": [104]}),
    ("post", "/detokenize", {"tokens": [10**9]}),
    ("post", "/apply-template", {"messages": TALK["messages"]}),
]


@pytest.fixture(scope="module")
def described(server: Server) -> Any:
    return json.loads(server.get("/openapi.json")[1])


@pytest.mark.parametrize(("method", "path", "body"), ASKED)
def test_an_answer_has_the_requested_form(
    server: Server, described: Any, method: str, path: str, body: Any
) -> None:
    if body is None:
        status, text = server.get(path)
        answer = json.loads(text)
    else:
        status, answer = server.post(path, body)
    route = path if path in described["paths"] else "/v1/models/{name}"
    response = described["paths"][route][method]["responses"][str(status)]
    schema = response["content"]["application/json"]["schema"]
    assert schema["$ref"].rpartition("/")[2] in described["components"]["schemas"]
    jsonschema.validate(answer, {**schema, "components": described["components"]})


def test_the_servers_own_limits_are_reported(server: Server) -> None:
    schemas = json.loads(server.get("/openapi.json")[1])["components"]["schemas"]
    for request in ("ChatRequest", "CompletionRequest"):
        assert schemas[request]["properties"]["n"]["anyOf"][0]["maximum"] == 8
