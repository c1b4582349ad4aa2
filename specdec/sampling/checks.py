"""Validation of SamplingParams: shapes, ranges, token ids, contradictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from specdec.checks import ConfigError, as_float, check

if TYPE_CHECKING:
    from specdec.config import SamplingParams

SEED_LIMIT = 2**64  # seeds are one 64-bit word of the noise generator's key
LOWEST_TEMPERATURE = 1e-4  # below this, logits / temperature may overflow float32
MAX_SEQUENCES = 1024
MAX_BEAMS = 1024
MAX_PENALTY = 16.0  # of the length, as an exponent: beyond it scores leave float32
MAX_LOGPROBS = 1024


def validate(params: SamplingParams) -> None:
    """Raise ConfigError for the first thing that is wrong."""
    _validate_ranges(params)
    _validate_token_ids(params)
    _validate_combinations(params)


def normalised(params: SamplingParams) -> dict[str, Any]:
    """Values for the fields that accept a list or a single item where a tuple is stored."""
    new: dict[str, Any] = {"temperature": as_float("temperature", params.temperature)}
    try:
        for name in ("suppress_tokens", "begin_suppress_tokens", "stop_token_ids"):
            new[name] = tuple(getattr(params, name) or ())
        for name in ("forced_eos_token_id", "eos_token_ids"):
            value = getattr(params, name)
            if value is not None:
                new[name] = (value,) if isinstance(value, int) else tuple(value)
        new["bad_words_ids"] = tuple(tuple(word) for word in params.bad_words_ids or ())
        bias = params.sequence_bias or ()
        pairs = bias.items() if isinstance(bias, Mapping) else bias
        new["sequence_bias"] = tuple((tuple(ids), float(value)) for ids, value in pairs)
        if params.exponential_decay_length_penalty is not None:
            start, factor = params.exponential_decay_length_penalty
            new["exponential_decay_length_penalty"] = (int(start), float(factor))
        stop = params.stop or ()
        new["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a sampling option has the wrong shape: {error}") from error
    return new


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
    check("repetition_penalty", params.repetition_penalty, float, 0.0, 1e4, open_low=True)
    check("seed", params.seed, int, 0, SEED_LIMIT - 1)
    check("max_tokens", params.max_tokens, int, 1)
    check("max_length", params.max_length, int, 1)
    _validate_sequences(params)
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop holds {text!r}, every stop must be a non-empty string")


def _validate_sequences(params: SamplingParams) -> None:
    for name, most in (("n", MAX_SEQUENCES), ("num_beams", MAX_BEAMS)):
        if getattr(params, name) is None:
            raise ConfigError(f"{name} is None, must be an integer")
        check(name, getattr(params, name), int, 1, most)
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
