"""Tokens and templates without a generation: llama.cpp's routes, and vLLM's names for them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from specdec.api import LLM
from specdec.serve.api.base import RequestModel, TokenId
from specdec.serve.api.chat import MAX_MESSAGES, MAX_TOOLS, ConversationFields, Message, Tool
from specdec.serve.api.conversation import functions
from specdec.serve.errors import bad_request
from specdec.serve.jobs import conversation_ids, conversation_text
from specdec.serve.process.messages import ServedModel
from specdec.serve.responses import Count, ResponseModel


class TokenizeRequest(RequestModel):
    """A text (`content`, or vLLM's `prompt`), or vLLM's `messages`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
        | None
    ) = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_special: bool | None = None  # llama.cpp's, false by default
    add_special_tokens: bool | None = None  # vLLM's, true by default
    parse_special: bool | None = None
    with_pieces: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: list[TokenId]


class TemplateRequest(ConversationFields):
    model: str | None = None


class TokenizeResponse(ResponseModel):
    """tokens: ids, or with `with_pieces` {id, piece}."""

    tokens: list[Any]
    count: Count
    max_model_len: Count
    token_strs: list[str] | None = None


class DetokenizeResponse(ResponseModel):
    """The text, by both names."""

    content: str
    prompt: str


class TemplateResponse(ResponseModel):
    prompt: str


class Properties(ResponseModel):
    """llama.cpp's properties of a server."""

    default_generation_settings: dict[str, Any]
    total_slots: Count
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


def tokenize(body: TokenizeRequest, llm: LLM) -> TokenizeResponse:
    """Return the tokens of a text. Raises ApiError, SpecdecError."""
    given = [item for item in (body.content, body.prompt, body.messages) if item is not None]
    if len(given) != 1:
        raise bad_request("send one of content, prompt and messages", "content")
    if body.messages is not None:
        chat = ConversationFields.model_construct(messages=body.messages, tools=body.tools)
        tools = [tool.model_dump(exclude_none=True) for tool in functions(body.tools)]
        ids = conversation_ids(chat, llm, tools)
    else:
        ids = _encode(body, str(given[0]), llm)
    response = TokenizeResponse(
        tokens=[_piece(i, llm) for i in ids] if body.with_pieces else ids,
        count=len(ids),
        max_model_len=llm.max_context,
    )
    if body.return_token_strs:
        response.token_strs = [llm.tokenizer.token_name(i) for i in ids]
    return response


def _encode(body: TokenizeRequest, text: str, llm: LLM) -> list[int]:
    if not text:
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_request("the text holds half of a character: send valid Unicode") from error
    is_vllm = body.prompt is not None
    adds_special = body.add_special_tokens is not False if is_vllm else bool(body.add_special)
    return llm.tokenizer.encode(
        text, add_special_tokens=adds_special, parse_special=body.parse_special is not False
    )


def _piece(token_id: int, llm: LLM) -> dict[str, Any]:
    data = llm.tokenizer.token_bytes(token_id)
    try:
        return {"id": token_id, "piece": data.decode() or llm.tokenizer.token_name(token_id)}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}  # as in llama.cpp


def detokenize(body: DetokenizeRequest, llm: LLM) -> DetokenizeResponse:
    """Return the text of tokens. Raises ApiError."""
    limit = llm.tokenizer.n_tokens
    for i, token in enumerate(body.tokens):
        if token >= limit:
            raise bad_request(f"tokens.{i} is {token}, the model has {limit} tokens", f"tokens.{i}")
    text = llm.tokenizer.decode(body.tokens)
    return DetokenizeResponse(content=text, prompt=text)


def apply_template(body: TemplateRequest, llm: LLM) -> TemplateResponse:
    """Return the prompt of a conversation. Raises ApiError, SpecdecError."""
    return TemplateResponse(prompt=conversation_text(body, llm))


def properties(name: str, model: ServedModel, num_replicas: int) -> Properties:
    """Return the properties; the model's path is its name, as paths are nobody's business."""
    settings = {"n_ctx": model.max_context, "params": {"temperature": 1.0, "n_predict": -1}}
    return Properties(
        default_generation_settings=settings,
        total_slots=model.num_slots * num_replicas,
        model_alias=name,
        model_path=name,
        modalities={"vision": False, "audio": False},
        chat_template=model.chat_template,
        bos_token=model.bos_token,
        eos_token=model.eos_token,
        build_info="specdec",
    )
