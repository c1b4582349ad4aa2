"""Fields that requests share, and which fields are ignored or refused.

A hint that does not change the text is ignored, whether it is known here or not. A field that asks
for something else than the answer would be is refused by name, as is one that looks misspelt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from specdec.serve.errors import bad_request

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_BIASES, MAX_TOKEN_IDS = 16, 256, 1024, 1024
MAX_TOP_LOGPROBS = 20
_LIKENESS = 0.85  # difflib's; "max_token" is 0.95 like "max_tokens", "store" 0.6 like "stop"

NEUTRAL: Mapping[str, tuple[Collection[Any], str]] = {
    "suffix": ((None, ""), "text is only generated behind a prompt"),
    "functions": ((None, []), "send tools"),
    "function_call": ((None, "auto", "none"), "send tool_choice"),
    "audio": ((None,), "this server takes and gives text only"),
    "web_search_options": ((None,), "this server fetches nothing"),
    "mirostat": ((None, 0), "there is no such sampler here"),
    "dry_multiplier": ((None, 0), "there is no such sampler here"),
    "xtc_probability": ((None, 0), "there is no such sampler here"),
    "dynatemp_range": ((None, 0), "there is no such sampler here"),
    "top_n_sigma": ((None, -1, 0), "there is no such sampler here"),
    "samplers": ((None, []), "the order of the samplers is fixed here"),
    "min_keep": ((None, 0, 1), "there is no such sampler here"),
    "t_max_predict_ms": ((None, -1, 0), "lower max_tokens"),
    "use_beam_search": ((None, False), "the server has no beam search"),
    "bad_words": ((None, []), "send logit_bias"),
    "allowed_token_ids": ((None, []), "send logit_bias, or a grammar"),
    "truncate_prompt_tokens": ((None, -1), "prompts are not cut here"),
    "logits_processors": ((None, []), "a request brings no code"),
    "skip_special_tokens": ((None, True), "special tokens have no text here"),
    "prompt_logprobs": (
        (None, False),
        "prompts have log-probabilities in /v1/completions and /v1/chat/completions",
    ),
    "prompt_embeds": ((None,), "send text or tokens"),
    "image_data": ((None, []), "this server takes text only"),
    "lora": ((None, []), "there are no adapters here"),
    "grammar_lazy": ((None, False), "a grammar holds from the first token on"),
    "parse_tool_calls": ((None, True), "send no tools to get calls as text"),
    "chat_template": ((None,), "the server is started with its template (--chat-template)"),
}
"""Fields that change the answer and are not supported: values that have no effect, and a remedy."""

HINTS = frozenset(
    "store metadata service_tier user verbosity cache_control prompt_cache_key prediction "
    "prompt_cache_retention prompt_cache_options safety_identifier id_slot slot_id n_keep "
    "n_discard request_id mm_processor_kwargs response_fields keep_alive "
    "mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers xtc_threshold dynatemp_exponent length_penalty "
    "spaces_between_special_tokens detokenize stream_obfuscation betas client_metadata".split()
)
"""Known fields without effect, which look misspelt by chance."""


EXTENSIONS = frozenset(
    "top_k min_p typical_p repetition_penalty repeat_penalty repeat_last_n presence_penalty "
    "frequency_penalty seed logit_bias min_tokens stop stop_token_ids ignore_eos priority "
    "cache_prompt return_progress chat_template_kwargs enable_thinking thinking_budget_tokens "
    "thinking_token_budget grammar json_schema structured_outputs guided_json guided_regex "
    "guided_choice guided_grammar".split()
)
"""Fields of chats that requests of the other APIs may have, too."""


class Lenient(BaseModel):
    """A JSON object whose unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class RequestModel(Lenient):
    """Body of a request: its unknown fields are kept, to be checked."""

    model_config = ConfigDict(extra="allow")
    known_elsewhere: ClassVar[frozenset[str]] = frozenset()

    @property
    def extensions(self) -> dict[str, Any]:
        """Fields of chats that the request has, although its own API does not."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in EXTENSIONS & extra.keys()}

    def check_unknown(self) -> None:
        """Raise ApiError for an unknown field that would change the answer, or looks misspelt."""
        for name, value in (self.model_extra or {}).items():
            _check_neutral(name, value)
            if value is not None and name not in {*NEUTRAL, *HINTS, *EXTENSIONS}:
                _check_spelling(name, type(self).model_fields)


def _check_neutral(name: str, value: Any) -> None:
    allowed, remedy = NEUTRAL.get(name, ((), ""))
    # 0 is no False: as `prompt_logprobs` it asks for something.
    is_neutral = any(
        value == item and isinstance(value, bool) == isinstance(item, bool) for item in allowed
    )
    if allowed and not is_neutral:
        raise bad_request(f"{name} is not supported: {remedy}", name)


def _check_spelling(name: str, known: Collection[str]) -> None:
    plain = {_plain(item): item for item in known if item not in HINTS}
    match = get_close_matches(_plain(name[:64]), plain, 1, _LIKENESS)
    if match:
        raise bad_request(f"{name[:64]} is unknown: did you mean {plain[match[0]]}?", name[:64])


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


class StreamOptions(Lenient):
    include_usage: bool | None = None
    include_draft: bool | None = None  # ours: how much of each pass's text was drafted


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Length = Annotated[int, Field(ge=-2)]
"""Tokens to generate; -1, and llama.cpp's -2, are as many as there may be."""
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
ListedBias = Annotated[list[str | bool | int | float], Field(min_length=2, max_length=2)]
"""llama.cpp's [token id or text, bias or false], where false bans."""


class StructuredOutputs(Lenient):
    """vLLM's constraint of a text; `guided_*` are its older names."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstraintFields(RequestModel):
    """Constraints of the text, by llama.cpp's and vLLM's names."""

    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(min_length=1, max_length=1024)] | None = None
    guided_grammar: str | None = None


class Sampling(ConstraintFields):
    """Fields that chat and plain completions share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Length | None = None
    n_predict: Length | None = None  # llama.cpp's name
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)]
        | Annotated[list[ListedBias], Field(max_length=MAX_BIASES)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's; vLLM and llama.cpp have them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None
    repeat_penalty: Annotated[float, Field(ge=1e-4, le=1e4)] | None = None  # llama.cpp's name
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None  # llama.cpp's: every event of a stream has `timings`
    return_progress: bool | None = None  # llama.cpp's: a stream tells of the prompt's progress
    prompt_logprobs: (  # vLLM's
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | Literal[False] | None
    ) = None
