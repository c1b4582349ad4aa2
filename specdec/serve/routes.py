"""Routes that generate, each a translation to a chat or a completion, and those about tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from specdec.api import LLM
from specdec.serve.answering import answer_to
from specdec.serve.api import messages, ollama, responses, tokens
from specdec.serve.api.answer import Answer
from specdec.serve.api.base import RequestModel
from specdec.serve.api.chat import ChatRequest
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.api.messages_answer import AnthropicResponse, MessagesAnswer, TokenCount
from specdec.serve.api.ollama_answer import (
    OllamaChatAnswer,
    OllamaChatResponse,
    OllamaGenerateAnswer,
    OllamaGenerateResponse,
    now,
)
from specdec.serve.api.openai_answers import ChatAnswer, CompletionAnswer
from specdec.serve.api.reading import read_request
from specdec.serve.api.responses_answer import ResponseObject, ResponsesAnswer
from specdec.serve.endpoint import Endpoint, Reading
from specdec.serve.errors import (
    ANTHROPIC_PATHS,
    OLLAMA_PATHS,
    AnthropicError,
    OllamaError,
    bad_request,
)
from specdec.serve.jobs import JobHead, conversation_ids, offered_tool_fields
from specdec.serve.middleware import BODY
from specdec.serve.openapi import Responses, errors_of, gives, takes
from specdec.serve.responses import ChatCompletion, Completion, JsonResponse, ResponseModel
from specdec.serve.router.keep_alive import EXAMPLES, parse_keep_alive
from specdec.serve.service import Service

_TEXT = "The text, or with stream its events"
_R = TypeVar("_R", bound=RequestModel)
AnswerType = Callable[[str, JobHead, Any], Answer]
Shortcut = Callable[[Any], OllamaChatResponse | OllamaGenerateResponse | None]
Translate = Callable[[Any], ChatRequest | CompletionRequest]


class Routes:
    """Adds routes to an application."""

    def __init__(self, app: FastAPI, service: Service) -> None:
        self._app, self._service = app, service

    def add_all(self) -> None:
        self._add_openai()
        self._add_responses()
        self._add_anthropic()
        self._add_ollama()
        self._add_tokens()

    def _add_openai(self) -> None:
        chat = self._endpoint(ChatRequest, lambda body: body, ChatAnswer)
        completion = self._endpoint(CompletionRequest, lambda body: body, CompletionAnswer)
        self._add("/v1/chat/completions", ChatRequest, ChatCompletion, chat)
        self._add("/v1/completions", CompletionRequest, Completion, completion)

    def _add_responses(self) -> None:
        form = responses.ResponsesRequest
        endpoint = self._endpoint(form, responses.responses_chat, ResponsesAnswer)
        self._add("/v1/responses", form, ResponseObject, endpoint)

    def _add_anthropic(self) -> None:
        form = messages.MessagesRequest
        endpoint = self._endpoint(form, messages.messages_chat, MessagesAnswer)
        self._add("/v1/messages", form, AnthropicResponse, endpoint)
        path = "/v1/messages/count_tokens"
        self._add_computed(path, messages.CountRequest, TokenCount, count_tokens)

    def _add_ollama(self) -> None:
        chat = self._endpoint(ollama.OllamaChatRequest, ollama.ollama_chat, OllamaChatAnswer)
        generate = self._endpoint(
            ollama.OllamaGenerateRequest,
            lambda body: (
                ollama.generate_completion(body) if body.raw else ollama.generate_chat(body)
            ),
            OllamaGenerateAnswer,
        )
        media = "application/x-ndjson"
        self._add(
            "/api/chat", ollama.OllamaChatRequest, OllamaChatResponse, chat, media, _loaded_chat
        )
        self._add(
            "/api/generate",
            ollama.OllamaGenerateRequest,
            OllamaGenerateResponse,
            generate,
            media,
            _loaded_text,
        )

    def _add_tokens(self) -> None:
        self._add_computed(
            "/tokenize", tokens.TokenizeRequest, tokens.TokenizeResponse, tokens.tokenize
        )
        self._add_computed(
            "/detokenize", tokens.DetokenizeRequest, tokens.DetokenizeResponse, tokens.detokenize
        )
        self._add_computed(
            "/apply-template",
            tokens.TemplateRequest,
            tokens.TemplateResponse,
            tokens.apply_template,
        )

    def _endpoint(
        self, form: type[RequestModel], translate: Translate, answer: AnswerType
    ) -> Endpoint:
        def read(body: bytearray) -> Reading:
            given = self._read(body, form)
            chat = translate(given)
            repeated = None
            if isinstance(given, responses.ResponsesRequest):
                repeated = responses.repeated_fields(given)
            return replace(reading_of(given, chat), repeated=repeated, streams=bool(chat.stream))

        return Endpoint(read, answer)

    def _read(self, body: bytearray, form: type[_R]) -> _R:
        request = read_request(body, form)
        self._service.router.find(getattr(request, "model", None))  # an unknown one is refused
        return request

    def _add(
        self,
        path: str,
        form: type[RequestModel],
        response: type[ResponseModel],
        endpoint: Endpoint,
        stream_type: str = "text/event-stream",
        shortcut: Shortcut | None = None,
    ) -> None:
        """Add a route. shortcut: returns the answer to a request that only loads the model."""

        async def answer(request: Request) -> Response:
            check_content_type(request)
            if shortcut is not None:
                given = self._read(request.scope[BODY].content, form)
                made = shortcut(given)
                if made is not None:
                    return JsonResponse(await self._loaded(made, given, request))
            return await answer_to(self._service, request, endpoint)

        self._app.add_api_route(
            path,
            answer,
            methods=["POST"],
            responses=_errors(path) | gives(response, _TEXT, stream_type=stream_type),
            openapi_extra=takes(form),
            operation_id=path.strip("/"),
        )

    async def _loaded(
        self, made: OllamaChatResponse | OllamaGenerateResponse, given: Any, request: Request
    ) -> ResponseModel:
        """Load the model of Ollama's request, or unload it if that says `keep_alive: 0`."""
        reading = reading_of(given)
        runner = self._service.router.find(reading.model)
        if runner.options.is_kept:
            return made
        if reading.keep_alive == 0.0:
            self._service.router.unload(runner)
            made.done_reason = "unload"
        else:
            await self._service.load(reading, request)
        return made

    def _add_computed(
        self,
        path: str,
        form: type[_R],
        response: type[ResponseModel],
        compute: Callable[[_R, LLM], ResponseModel],
    ) -> None:
        """Add a route that generates nothing. compute: a module's function, as the engine's process
        imports it."""

        async def answer(request: Request) -> Response:
            check_content_type(request)
            result = await self._service.compute(
                request, lambda body: reading_of(self._read(body, form)), compute
            )
            return JsonResponse(result)

        self._app.add_api_route(
            path,
            answer,
            methods=["POST"],
            responses=_errors(path) | gives(response, "The result"),
            openapi_extra=takes(form),
            operation_id=path.strip("/"),
        )


def count_tokens(body: messages.CountRequest, llm: LLM) -> TokenCount:
    """Return the number of a conversation's tokens. Raises ApiError, SpecdecError."""
    chat = messages.messages_chat(body)
    return TokenCount(input_tokens=len(conversation_ids(chat, llm, offered_tool_fields(chat))))


def _errors(path: str) -> Responses:
    if path.startswith(ANTHROPIC_PATHS):
        return errors_of(AnthropicError)
    return errors_of(OllamaError) if path.startswith(OLLAMA_PATHS) else {}


def _loaded_chat(body: ollama.OllamaChatRequest) -> OllamaChatResponse | None:
    """Return the answer to Ollama's request to load the model, which has no messages."""
    if body.messages:
        return None
    message = {"role": "assistant", "content": ""}
    return OllamaChatResponse(
        model=body.model or "", created_at=now(), message=message, done=True, done_reason="load"
    )


def _loaded_text(body: ollama.OllamaGenerateRequest) -> OllamaGenerateResponse | None:
    """See `_loaded_chat`."""
    if body.prompt:
        return None
    return OllamaGenerateResponse(
        model=body.model or "", created_at=now(), response="", done=True, done_reason="load"
    )


_OF_BROWSERS = ("Origin", "Sec-Fetch-Site")
"""Headers of every POST that a page makes (Fetch standard)."""


def check_content_type(request: Request) -> None:
    """Refuse what a browser sends for a page of another site without asking: another type.

    Browsers tell where a request is from; curl sends the type of a form if none is given, and
    litellm none to Ollama's routes.
    """
    if not any(name in request.headers for name in _OF_BROWSERS):
        return
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise bad_request("send a JSON object, with Content-Type: application/json")


def reading_of(given: Any, form: Any = None) -> Reading:
    """Return the reading of a request, of which the engine gets `form`. Raises ApiError."""
    keep_alive = getattr(given, "keep_alive", None)
    try:
        seconds = None if keep_alive is None else parse_keep_alive(keep_alive)
    except ValueError as error:
        raise bad_request(f"keep_alive must be {EXAMPLES}", "keep_alive") from error
    model = getattr(given, "model", None)
    return Reading(given if form is None else form, model=model, keep_alive=seconds)
