"""Types of the keywords of `generate` and `stream`, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict


class SamplingKeywords(TypedDict, total=False):
    """Fields of SamplingParams (tested), with the forms that each is accepted in."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_h: float | None
    epsilon_cutoff: float
    eta_cutoff: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    no_repeat_ngram_size: int
    min_tokens: int
    min_length: int
    bad_words_ids: Sequence[Sequence[int]]
    sequence_bias: Mapping[tuple[int, ...], float] | Sequence[tuple[Sequence[int], float]]
    suppress_tokens: Sequence[int]
    begin_suppress_tokens: Sequence[int]
    forced_bos_token_id: int | None
    forced_eos_token_id: int | Sequence[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool
    renormalize_logits: bool
    seed: int | None
    stop: str | Sequence[str]
    json_schema: str | Mapping[str, Any] | None
    json_object: bool
    regex: str | None
    grammar: str | None
    stop_token_ids: Sequence[int]
    eos_token_ids: int | Sequence[int] | None
    max_tokens: int
    max_length: int | None
    ignore_eos: bool
    logprobs: bool | int
    prompt_logprobs: int | None
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | str
