"""What options of sampling may be, and how they are kept.

An error names the option, the value it got and what would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checks import ConfigError, as_float, check, check_type
from specdec.grammar.constraint import schema_text

if TYPE_CHECKING:
    from specdec.sampling.params import SamplingParams

SEED_LIMIT = 2**64  # seeds are one 64-bit word of the noise generator's key
LOWEST_TEMPERATURE = 1e-4  # below this, logits / temperature may overflow float32
MAX_PENALTY = 16.0  # of the length, as an exponent: beyond it scores leave float32
MAX_LOGPROBS = 1024
MAX_TOKEN_PENALTY = 2.0  # OpenAI's range of frequency_penalty and presence_penalty
MAX_LOGIT_BIAS = 100.0  # OpenAI's: it bans a token, or lets nothing else be chosen


def stored_values(params: SamplingParams) -> dict[str, Any]:
    """Values for the fields that accept a list or a single item where a tuple is stored."""
    new: dict[str, Any] = {"temperature": as_float("temperature", params.temperature)}
    stop = () if params.stop is None else params.stop
    check_type("stop", stop, str, list, tuple)
    new["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    new["json_schema"] = schema_text(params.json_schema)
    for name, stored in _STORED_AS.items():
        value = getattr(params, name)
        try:
            new[name] = stored(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{name} is {value!r:.80}, of the wrong shape: {error}") from error
    return new


def validate(params: SamplingParams) -> None:
    """Raise ConfigError for what makes no sense, alone or together."""
    _validate_types(params)
    _validate_ranges(params)
    _validate_token_ids(params)
    _validate_combinations(params)
    _validate_constraint(params)


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, int) else tuple(value)


def _start_and_factor(value: Any) -> tuple[int, float]:
    start, factor = value
    return int(start), float(factor)


def _pairs(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, Mapping) else value or ()


def _or_none(stored: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else stored(value)


_STORED_AS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"),
        lambda value: tuple(value or ()),
    ),
    **dict.fromkeys(("forced_eos_token_id", "eos_token_ids"), _or_none(_one_or_more)),
    "bad_words_ids": lambda value: tuple(tuple(word) for word in value or ()),
    "sequence_bias": lambda value: tuple((tuple(ids), float(one)) for ids, one in _pairs(value)),
    "logit_bias": lambda value: tuple((token, float(one)) for token, one in _pairs(value)),
    "exponential_decay_length_penalty": _or_none(_start_and_factor),
}
"""How fields are kept that are given in several ways."""


def _validate_types(params: SamplingParams) -> None:
    for name in ("ignore_eos", "json_object", "renormalize_logits"):
        check_type(name, getattr(params, name), bool)
    for name in ("regex", "grammar"):
        check_type(name, getattr(params, name), str, type(None))
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop holds {text!r}, every stop must be a non-empty string")


def _validate_ranges(params: SamplingParams) -> None:
    if params.temperature != 0.0 and not LOWEST_TEMPERATURE <= params.temperature <= 1e4:
        bounds = f"0 (greedy) or from {LOWEST_TEMPERATURE} to 10000"
        raise ConfigError(f"temperature is {params.temperature}, must be {bounds}")
    for name in ("top_k", "no_repeat_ngram_size", "min_tokens", "min_length"):
        if getattr(params, name) is None:
            raise ConfigError(f"{name} is None, must be an integer (0 switches it off)")
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
        check("a bias of logit_bias", bias, float, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
    check("seed", params.seed, int, 0, SEED_LIMIT - 1)
    check_type("max_tokens", params.max_tokens, int)
    check("max_tokens", params.max_tokens, int, 1)
    check("max_length", params.max_length, int, 1)
    _validate_sequences(params)


def _validate_sequences(params: SamplingParams) -> None:
    length_penalty = as_float("length_penalty", params.length_penalty)
    check("length_penalty", length_penalty, float, -MAX_PENALTY, MAX_PENALTY)
    if not any(params.early_stopping is one for one in (True, False)) and (
        params.early_stopping != "never"
    ):
        raise ConfigError(
            f"early_stopping is {params.early_stopping!r}, must be True, False or 'never'"
        )
    if not isinstance(params.logprobs, bool):
        check("logprobs", params.logprobs, int, 0, MAX_LOGPROBS)


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
            check(f"a token id of {name}", token_id, int, 0)
    check("forced_bos_token_id", params.forced_bos_token_id, int, 0)
    if not all(params.bad_words_ids) or not all(ids for ids, _ in params.sequence_bias):
        raise ConfigError("bad_words_ids or sequence_bias holds an empty sequence of token ids")


def _validate_combinations(params: SamplingParams) -> None:
    if params.max_length is None and params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})"
        )
    if params.num_beams == 1:
        _refuse_without_beams(params)
    elif params.n > params.num_beams:
        raise ConfigError(
            f"n (num_return_sequences) is {params.n}, but beam search with num_beams "
            f"{params.num_beams} finds no more than that: raise num_beams"
        )
    if params.ignore_eos and params.forced_eos_token_id is not None:
        raise ConfigError("forced_eos_token_id contradicts ignore_eos: leave one of them out")
    forced_bos = () if params.forced_bos_token_id is None else (params.forced_bos_token_id,)
    for forced in (forced_bos, params.forced_eos_token_id or ()):
        if forced and set(forced) <= set(params.suppress_tokens):
            raise ConfigError(f"tokens {sorted(forced)} are both forced and in suppress_tokens")


def _validate_constraint(params: SamplingParams) -> None:
    constraint = params.constraint
    if constraint is None:
        return
    contradictions = {
        "num_beams": params.num_beams > 1,  # beams part, and a matcher holds one place
        "ignore_eos": params.ignore_eos,  # nothing else may follow a finished text
        "forced_bos_token_id": params.forced_bos_token_id is not None,
        "forced_eos_token_id": params.forced_eos_token_id is not None,
    }
    for name, is_set in contradictions.items():
        if is_set:
            raise ConfigError(
                f"{name} is {getattr(params, name)}, which does not go with {constraint.kind}: "
                "leave one of them out"
            )
    constraint.grammar  # noqa: B018 (it is checked by being made)


def _refuse_without_beams(params: SamplingParams) -> None:
    if params.n > 1 and params.is_greedy:
        raise ConfigError(
            f"n (num_return_sequences) is {params.n}, but greedy decoding has one result: "
            "set a temperature or num_beams"
        )
    for name, off in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(params, name) != off:
            raise ConfigError(
                f"{name} is {getattr(params, name)!r}, but num_beams is 1: it ranks beams"
            )
