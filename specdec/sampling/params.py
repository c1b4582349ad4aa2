"""SamplingParams: how tokens are chosen and when generation ends; frozen, validated when made.

An error names the option, its value and the accepted values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.checks import ConfigError, FieldName, as_float, check, check_type, refuse_unknown
from specdec.grammar.constraint import KINDS, Constraint
from specdec.option import BEAMS, SAMPLING, check_options, option
from specdec.sampling.stored_values import stored_values

if TYPE_CHECKING:
    from transformers import GenerationConfig

SEED_LIMIT = 2**64  # seeds are one 64-bit word of the noise generator's key
LOWEST_TEMPERATURE = 1e-4  # below this, logits / temperature may overflow float32
MAX_SEQUENCES = 1024
MAX_BEAMS = 1024
MAX_PENALTY = 16.0  # exponent of the length: beyond it scores overflow float32
MAX_LOGPROBS = 1024
UNLIMITED_TOKENS = 2**31 - 1  # max_tokens in place of no limit: the context is full long before
MAX_TOKEN_PENALTY = 2.0  # OpenAI's range of frequency_penalty and presence_penalty
MAX_LOGIT_BIAS = 100.0  # OpenAI's: it bans a token or forces it

TokenBias = tuple[tuple[int, float], ...]
SequenceBias = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters by which tokens are chosen from the target's logits and generation ends.

    Names are vLLM's where vLLM has the option, else transformers'; the meaning is that of
    transformers' LogitsProcessors in the order in which `generate` applies them. OpenAI's biases
    and penalties, which transformers lacks, are applied where vLLM and llama.cpp do it. Temperature
    0 is greedy decoding: penalties, bans and forced tokens still apply, and options marked (warper)
    have no effect, exactly as with `do_sample=False`.
    """

    temperature: float = option(0.0, "0, the default, is greedy.", SAMPLING)
    top_k: int = option(0, "Keep the k likeliest tokens; 0 keeps all.", SAMPLING)  # (warper)
    top_p: float = option(
        1.0, "Keep the likeliest tokens whose probabilities add up to this.", SAMPLING
    )  # (warper)
    min_p: float = option(  # (warper)
        0.0, "Drop tokens below this share of the likeliest one.", SAMPLING
    )
    typical_p: float = 1.0  # (warper)
    top_h: float | None = None  # (warper)
    epsilon_cutoff: float = 0.0  # (warper)
    eta_cutoff: float = 0.0  # (warper)
    repetition_penalty: float = option(
        1.0, "Above 1: tokens already seen become less likely.", SAMPLING
    )
    frequency_penalty: float = option(  # OpenAI's, as is the next one
        0.0, "Subtract this from a token's logit for each time it occurs in the output.", SAMPLING
    )
    presence_penalty: float = option(
        0.0, "Subtract this from the logits of all tokens that occur in the output.", SAMPLING
    )
    logit_bias: TokenBias = ()  # ((token id, bias added to its logit), ...)
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0  # new tokens before an end-of-sequence token is possible
    min_length: int = 0  # the same, counted with the prompt
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    sequence_bias: SequenceBias = ()  # ((token ids, bias added to the last one's logit), ...)
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] | None = None  # forced at the last position allowed
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool = False
    renormalize_logits: bool = False
    seed: int | None = option(  # None = a fresh one for every generation
        None, "The same seed gives the same tokens, whatever the draft and the budget.", SAMPLING
    )
    stop: tuple[str, ...] = option(  # the output ends before the first one that appears
        (), "Stop before this string; may be given several times.", SAMPLING, shown_default=False
    )
    json_schema: str | Mapping[str, Any] | None = option(  # stored as a string
        None,
        "Constrain the output to JSON that follows this schema.",
        SAMPLING,
        metavar="FILE",
    )
    json_object: bool = False  # the output is any JSON object
    regex: str | None = option(
        None, "Constrain the output to text that matches this regular expression.", SAMPLING
    )
    grammar: str | None = option(
        None,
        "Constrain the output to this grammar: Lark, or llama.cpp's GBNF.",
        SAMPLING,
        metavar="FILE",
    )
    stop_token_ids: tuple[int, ...] = ()  # end generation, besides the end-of-sequence tokens
    eos_token_ids: tuple[int, ...] | None = None  # None = the model's own
    max_tokens: int = 64  # new tokens
    max_length: int | None = None  # prompt and new tokens together; overrides max_tokens when set
    ignore_eos: bool = False
    logprobs: bool | int = False  # True: of the emitted tokens; k: also of the k likeliest
    prompt_logprobs: int | None = None  # k: of the prompt's tokens, and of the k likeliest
    n: int = option(
        1,
        "Sequences to return: of seeds SEED, SEED+1, ..., or the best of the beams.",
        BEAMS,
        long="--num-return-sequences",
        at_least=1,
        at_most=MAX_SEQUENCES,
        shown_default="1",
    )
    num_beams: int = option(
        1,
        "Above 1: beam search, without drafting; with a temperature, beam-search sampling.",
        BEAMS,
        at_least=1,
        at_most=MAX_BEAMS,
        shown_default="1",
    )
    length_penalty: float = option(
        1.0,
        "Beams are ranked by log-probability / length^this; above 0 prefers long ones.",
        BEAMS,
        shown_default="1.0",
    )
    early_stopping: bool | str = option(
        False,
        "When to end a beam search: at num-beams finished ones, by estimate, or surely.",
        BEAMS,
        metavar="true|false|never",
        shown_default="false",
    )

    def __post_init__(self) -> None:
        for name, value in stored_values(vars(self)).items():
            object.__setattr__(self, name, value)  # tuples in place of lists, before validation
        check_options(self)
        _validate_types(self)
        _validate_ranges(self)
        _validate_token_ids(self)
        _validate_combinations(self)
        _validate_constraint(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def constraint(self) -> Constraint | None:
        """The schema, regular expression or grammar of the output, if any."""
        return Constraint.among({kind: getattr(self, kind) for kind in KINDS})

    @property
    def n_top_logprobs(self) -> int:
        """Number of likeliest tokens whose log-probabilities are requested at every position."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs

    def token_limit(self, prompt_length: int) -> int:
        """Return the maximum new tokens after a prompt of `prompt_length` tokens (may be ≤ 0)."""
        return self.max_tokens if self.max_length is None else self.max_length - prompt_length

    def resolve_eos(self, model_eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Return the end-of-sequence ids for the processors: the caller's, else the model's."""
        return tuple(model_eos_token_ids) if self.eos_token_ids is None else self.eos_token_ids

    def resolve_stop_tokens(self, model_eos_token_ids: Iterable[int]) -> frozenset[int]:
        """Return all token ids that end a generation."""
        eos = () if self.ignore_eos else self.resolve_eos(model_eos_token_ids)
        return frozenset(eos) | frozenset(self.stop_token_ids)

    def replace(self, **overrides: Any) -> SamplingParams:
        """Return a copy with some options changed. Raises UnknownOption."""
        refuse_unknown(overrides, type(self))
        return dataclasses.replace(self, **overrides)

    @classmethod
    def from_generation_config(cls, config: GenerationConfig | Mapping[str, Any]) -> SamplingParams:
        """Return parameters with the same output as `generate` with this configuration.

        A mapping is read like a `generation_config.json`. Raises ConfigError for options that
        cannot be honoured exactly, instead of ignoring them.
        """
        from specdec.sampling.hf_config import options_from

        return cls(**options_from(config))


def _validate_types(params: SamplingParams) -> None:
    for name in ("ignore_eos", "json_object", "renormalize_logits"):
        check_type(name, getattr(params, name), bool)
    for name in ("regex", "grammar"):
        check_type(name, getattr(params, name), str, type(None))
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(
                FieldName("stop"), f" holds {text!r}, every stop must be a non-empty string"
            )


def _validate_ranges(params: SamplingParams) -> None:
    if params.temperature != 0.0 and not LOWEST_TEMPERATURE <= params.temperature <= 1e4:
        bounds = f"0 (greedy) or from {LOWEST_TEMPERATURE} to 10000"
        raise ConfigError(FieldName("temperature"), f" is {params.temperature}, must be {bounds}")
    for name in ("top_k", "no_repeat_ngram_size", "min_tokens", "min_length"):
        if getattr(params, name) is None:
            raise ConfigError(FieldName(name), " is None, must be an integer (0 switches it off)")
        check(name, getattr(params, name), int, 0)
    for name in ("top_p", "typical_p", "top_h"):
        check(name, getattr(params, name), float, 0.0, 1.0, open_low=True)
    check("min_p", params.min_p, float, 0.0, 1.0)
    for name in ("epsilon_cutoff", "eta_cutoff"):
        check(name, getattr(params, name), float, 0.0, 1.0, open_high=True)
    check("repetition_penalty", params.repetition_penalty, float, 1e-4, 1e4)  # within float32
    for name in ("frequency_penalty", "presence_penalty"):
        check(name, getattr(params, name), float, -MAX_TOKEN_PENALTY, MAX_TOKEN_PENALTY)
    for _, bias in params.logit_bias:
        check("logit_bias", bias, float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, part="a bias of ")
    check("seed", params.seed, int, 0, SEED_LIMIT - 1)
    check_type("max_tokens", params.max_tokens, int)
    check("max_tokens", params.max_tokens, int, 1)
    check("max_length", params.max_length, int, 1)
    _validate_sequences(params)


def _validate_sequences(params: SamplingParams) -> None:
    length_penalty = as_float("length_penalty", params.length_penalty)
    check("length_penalty", length_penalty, float, -MAX_PENALTY, MAX_PENALTY)
    if not any(params.early_stopping is flag for flag in (True, False)) and (
        params.early_stopping != "never"
    ):
        raise ConfigError(
            FieldName("early_stopping"),
            f" is {params.early_stopping!r}, must be True, False or 'never'",
        )
    if not isinstance(params.logprobs, bool):
        check("logprobs", params.logprobs, int, 0, MAX_LOGPROBS)
    check_type("prompt_logprobs", params.prompt_logprobs, int, type(None))
    check("prompt_logprobs", params.prompt_logprobs, int, 0, MAX_LOGPROBS)


def _validate_token_ids(params: SamplingParams) -> None:
    lists: dict[str, Iterable[int]] = {
        "suppress_tokens": params.suppress_tokens,
        "begin_suppress_tokens": params.begin_suppress_tokens,
        "stop_token_ids": params.stop_token_ids,
        "eos_token_ids": params.eos_token_ids or (),
        "forced_eos_token_id": params.forced_eos_token_id or (),
        "bad_words_ids": [token for word in params.bad_words_ids for token in word],
        "sequence_bias": [token for ids, _ in params.sequence_bias for token in ids],
        "logit_bias": [token for token, _ in params.logit_bias],
    }
    for name, token_ids in lists.items():
        for token_id in token_ids:
            check(name, token_id, int, 0, part="a token id of ")
    check("forced_bos_token_id", params.forced_bos_token_id, int, 0)
    if not all(params.bad_words_ids) or not all(ids for ids, _ in params.sequence_bias):
        raise ConfigError(
            FieldName("bad_words_ids"),
            " or ",
            FieldName("sequence_bias"),
            " holds an empty sequence of token ids",
        )


def _validate_combinations(params: SamplingParams) -> None:
    if params.max_length is None and params.min_tokens > params.max_tokens:
        raise ConfigError(
            FieldName("min_tokens"),
            f" ({params.min_tokens}) is above ",
            FieldName("max_tokens"),
            f" ({params.max_tokens})",
        )
    if params.num_beams == 1:
        _refuse_without_beams(params)
    elif params.n > params.num_beams:
        raise ConfigError(
            FieldName("n", also="num_return_sequences"),
            f" is {params.n}, but beam search with ",
            FieldName("num_beams"),
            f" {params.num_beams} finds no more than that: raise ",
            FieldName("num_beams"),
        )
    if params.num_beams > 1 and params.prompt_logprobs is not None:
        raise ConfigError(
            FieldName("prompt_logprobs"),
            " are not computed by a beam search: leave ",
            FieldName("num_beams"),
            " out",
        )
    if params.ignore_eos and params.forced_eos_token_id is not None:
        raise ConfigError(
            FieldName("forced_eos_token_id"),
            " contradicts ",
            FieldName("ignore_eos"),
            ": leave one of them out",
        )
    forced_bos = () if params.forced_bos_token_id is None else (params.forced_bos_token_id,)
    for forced in (forced_bos, params.forced_eos_token_id or ()):
        if forced and set(forced) <= set(params.suppress_tokens):
            raise ConfigError(
                f"tokens {sorted(forced)} are both forced and in ", FieldName("suppress_tokens")
            )


def _validate_constraint(params: SamplingParams) -> None:
    constraint = params.constraint
    if constraint is None:
        return
    contradictions = {
        "num_beams": params.num_beams > 1,  # beams diverge, and a matcher has one state
        "ignore_eos": params.ignore_eos,  # nothing else may follow a complete output
        "forced_bos_token_id": params.forced_bos_token_id is not None,
        "forced_eos_token_id": params.forced_eos_token_id is not None,
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise ConfigError(
                FieldName(name),
                f" is {getattr(params, name)}, which does not go with ",
                FieldName(constraint.kind),
                ": leave one of them out",
            )
    constraint.grammar  # noqa: B018 (it is checked by being made)


def _refuse_without_beams(params: SamplingParams) -> None:
    if params.n > 1 and params.is_greedy:
        raise ConfigError(
            FieldName("n", also="num_return_sequences"),
            f" is {params.n}, but greedy decoding has one result: set a temperature or ",
            FieldName("num_beams"),
        )
    for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != off:
            raise ConfigError(
                FieldName(name),
                f" is {getattr(params, name)!r}, but ",
                FieldName("num_beams"),
                " is 1: it ranks beams",
            )
