"""Requests of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specdec.serve.api.base import MAX_TOP_LOGPROBS, Sampling, TokenId
from specdec.serve.api.chat import ResponseFormat


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
        | Annotated[
            list[Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]],
            Field(fail_fast=True, min_length=1),
        ]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None  # llama.cpp's name
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
