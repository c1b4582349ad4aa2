"""What a caller may ask for: how to sample, and how to speculate.

Both configurations are frozen and validated once, when they are made, so that no later stage has to
check again. An error names the option, the value it got and what would be accepted.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.errors import SpecdecError

if TYPE_CHECKING:
    from transformers import GenerationConfig

SEED_LIMIT = 2**64  # seeds are one 64-bit word of the noise generator's key
LOWEST_TEMPERATURE = 1e-4  # below this, logits / temperature may overflow float32
SPEC_TYPES = ("draft", "ngram")
ACCEPTANCE_RULES = ("match", "rejection")
DEFAULT_TREE_WIDTH = 8
DEFAULT_DRAFT_DEPTH = 32
MAX_DRAFT_TOKENS = 1024
MIN_DRAFT_WINDOW = 16

SequenceBias = tuple[tuple[tuple[int, ...], float], ...]


class ConfigError(SpecdecError, ValueError):
    """An option is unknown, out of range, not supported, or contradicts another one."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen from the target's logits, and when generation ends.

    The names are vLLM's where vLLM has the option and transformers' otherwise; the meaning is that
    of transformers' LogitsProcessors in the order in which `generate` applies them. Temperature 0
    is greedy decoding: penalties, bans and forced tokens still apply, the options marked (warper)
    have no effect, exactly as with `do_sample=False`.
    """

    temperature: float = 0.0
    top_k: int = 0  # (warper) 0 = off
    top_p: float = 1.0  # (warper)
    min_p: float = 0.0  # (warper)
    typical_p: float = 1.0  # (warper)
    top_h: float | None = None  # (warper)
    epsilon_cutoff: float = 0.0  # (warper)
    eta_cutoff: float = 0.0  # (warper)
    repetition_penalty: float = 1.0
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
    seed: int | None = None  # None = a fresh one for every generation
    stop: tuple[str, ...] = ()  # strings; the text ends before the first one that appears
    stop_token_ids: tuple[int, ...] = ()  # end generation, besides the end-of-sequence tokens
    eos_token_ids: tuple[int, ...] | None = None  # None = the model's own
    max_tokens: int = 64  # new tokens
    max_length: int | None = None  # prompt and new tokens together; overrides max_tokens when set
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, value in _normalised(self).items():
            object.__setattr__(self, name, value)  # tuples for lists, once, before validation
        _validate_ranges(self)
        _validate_token_ids(self)
        _validate_combinations(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def token_limit(self, prompt_length: int) -> int:
        """New tokens that may follow a prompt of `prompt_length` tokens (may be ≤ 0)."""
        return self.max_tokens if self.max_length is None else self.max_length - prompt_length

    def resolve_eos(self, model_eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The end-of-sequence ids the processors know: the caller's, else the model's."""
        return tuple(model_eos_token_ids) if self.eos_token_ids is None else self.eos_token_ids

    def resolve_stop_tokens(self, model_eos_token_ids: Iterable[int]) -> frozenset[int]:
        """All token ids that end a generation."""
        eos = () if self.ignore_eos else self.resolve_eos(model_eos_token_ids)
        return frozenset(eos) | frozenset(self.stop_token_ids)

    def replace(self, **overrides: Any) -> SamplingParams:
        """A copy with some options changed; unknown names are refused."""
        _refuse_unknown(overrides, type(self))
        return dataclasses.replace(self, **overrides)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a mapping of option names; unknown names are refused."""
        _refuse_unknown(options, cls)
        return cls(**options)

    @classmethod
    def from_generation_config(cls, config: GenerationConfig | Mapping[str, Any]) -> SamplingParams:
        """Parameters that give what `generate` gives with this configuration.

        A mapping is read like the content of a `generation_config.json`. Raises ConfigError for
        options that speculative decoding cannot honour exactly, instead of ignoring them.
        """
        from specdec.generation_config import options_from

        return cls(**options_from(config))

    def to_generation_config(self) -> GenerationConfig:
        """The transformers configuration with which `generate` does the same (imports torch)."""
        from specdec.generation_config import to_generation_config

        return to_generation_config(self)


@dataclass(frozen=True)
class SpecConfig:
    """How drafts are made and accepted. Whatever is None is chosen by the policy at run time.

    `acceptance="match"` samples the target's token first and follows it through the tree, so the
    output does not depend on the draft. `"rejection"` is the textbook rule for one sampled chain.
    """

    spec_type: tuple[str, ...] = SPEC_TYPES  # () = plain decoding
    num_draft_tokens: int | None = None  # nodes of a tree, its root not counted
    tree_width: int | None = None  # children of one node
    draft_depth: int | None = None
    acceptance: str = "match"
    draft_window: int | None = None  # recent tokens that a draft model is shown; None = all

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec_type", parse_spec_type(self.spec_type))
        if self.acceptance not in ACCEPTANCE_RULES:
            raise ConfigError(
                f"acceptance is {self.acceptance!r}, must be one of {', '.join(ACCEPTANCE_RULES)}"
            )
        _check("num_draft_tokens", self.num_draft_tokens, int, 0, MAX_DRAFT_TOKENS)
        _check("tree_width", self.tree_width, int, 1, MAX_DRAFT_TOKENS)
        _check("draft_depth", self.draft_depth, int, 1, MAX_DRAFT_TOKENS)
        _check("draft_window", self.draft_window, int, MIN_DRAFT_WINDOW)
        if self.acceptance == "rejection" and (self.tree_width or 1) > 1:
            raise ConfigError(
                f"acceptance 'rejection' verifies one chain, but tree_width is {self.tree_width}: "
                "leave tree_width unset or choose acceptance 'match'"
            )

    @property
    def drafters(self) -> tuple[str, ...]:
        """The kinds of draft in use: a rejection chain comes from one source, the model first."""
        is_single = self.acceptance == "rejection"
        return self.spec_type[:1] if is_single else self.spec_type

    @property
    def width(self) -> int:
        return 1 if self.acceptance == "rejection" else self.tree_width or DEFAULT_TREE_WIDTH

    @property
    def depth(self) -> int:
        return self.draft_depth or DEFAULT_DRAFT_DEPTH


def parse_spec_type(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """("draft", "ngram") from "draft,ngram", a sequence of names, or None / "none" for ()."""
    names = value.split(",") if isinstance(value, str) else list(value or ())
    names = [name.strip() for name in names]
    if names in ([], ["none"], [""]):
        return ()
    for name in names:
        if name not in SPEC_TYPES:
            raise ConfigError(
                f"spec_type {name!r} is unknown: use any of {', '.join(SPEC_TYPES)}, or none"
            )
    return tuple(name for name in SPEC_TYPES if name in names)


def _normalised(params: SamplingParams) -> dict[str, Any]:
    """Values for the fields that accept a list or a single item where a tuple is stored."""
    new: dict[str, Any] = {"temperature": _as_float("temperature", params.temperature)}
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


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is {value!r}, must be a number")
    return float(value)


def _check(
    name: str,
    value: Any,
    kind: type,
    low: float,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise ConfigError unless value is None or a `kind` from low to high, both included or not."""
    if value is None:
        return
    wanted = (int, float) if kind is float else (kind,)
    bounds = f"above {low}" if open_low else f"at least {low}"
    bounds += "" if high == math.inf else f" and {'below' if open_high else 'at most'} {high}"
    is_right_kind = isinstance(value, wanted) and not isinstance(value, bool)
    is_at_open_end = (open_low and value == low) or (open_high and value == high)
    if not is_right_kind or not low <= value <= high or is_at_open_end:
        noun = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name} is {value!r}, must be {noun} {bounds}")


def _validate_ranges(params: SamplingParams) -> None:
    if params.temperature != 0.0 and not LOWEST_TEMPERATURE <= params.temperature <= 1e4:
        bounds = f"0 (greedy) or from {LOWEST_TEMPERATURE} to 10000"
        raise ConfigError(f"temperature is {params.temperature}, must be {bounds}")
    for name in ("top_k", "no_repeat_ngram_size", "min_tokens", "min_length"):
        if getattr(params, name) is None:
            raise ConfigError(f"{name} is None, must be an integer (0 switches it off)")
        _check(name, getattr(params, name), int, 0)
    for name in ("top_p", "typical_p", "top_h"):
        _check(name, getattr(params, name), float, 0.0, 1.0, open_low=True)
    _check("min_p", params.min_p, float, 0.0, 1.0)
    for name in ("epsilon_cutoff", "eta_cutoff"):
        _check(name, getattr(params, name), float, 0.0, 1.0, open_high=True)
    _check("repetition_penalty", params.repetition_penalty, float, 0.0, 1e4, open_low=True)
    _check("seed", params.seed, int, 0, SEED_LIMIT - 1)
    _check("max_tokens", params.max_tokens, int, 1)
    _check("max_length", params.max_length, int, 1)
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"stop holds {text!r}, every stop must be a non-empty string")


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
            _check(f"a token id of {name}", token_id, int, 0)
    _check("forced_bos_token_id", params.forced_bos_token_id, int, 0)
    if not all(params.bad_words_ids) or not all(ids for ids, _ in params.sequence_bias):
        raise ConfigError("bad_words_ids or sequence_bias holds an empty sequence of token ids")


def _validate_combinations(params: SamplingParams) -> None:
    if params.max_length is None and params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})"
        )
    if params.ignore_eos and params.forced_eos_token_id is not None:
        raise ConfigError("forced_eos_token_id contradicts ignore_eos: leave one of them out")
    forced_bos = () if params.forced_bos_token_id is None else (params.forced_bos_token_id,)
    for forced in (forced_bos, params.forced_eos_token_id or ()):
        if forced and set(forced) <= set(params.suppress_tokens):
            raise ConfigError(f"tokens {sorted(forced)} are both forced and in suppress_tokens")


def _refuse_unknown(options: Mapping[str, Any], kind: type) -> None:
    known = [field.name for field in dataclasses.fields(kind)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"
            raise ConfigError(f"{kind.__name__} has no option {name!r}{hint}")
