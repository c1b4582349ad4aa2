"""What a caller may ask for: how to sample, and how to speculate.

Both configurations are frozen and validated once, when they are made, so that no later stage has to
check again. An error names the option, the value it got and what would be accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec.checks import ConfigError as ConfigError
from specdec.checks import check as _check
from specdec.checks import refuse_unknown
from specdec.sampling.checks import normalised, validate

if TYPE_CHECKING:
    from transformers import GenerationConfig

SPEC_TYPES = ("draft", "ngram")
CHAIN_RULES = ("rejection", "block")  # these verify one chain that was drawn from the draft
ACCEPTANCE_RULES = ("match", *CHAIN_RULES)
DRAFT_AHEAD_MODES = ("auto", "on", "off")
DEFAULT_TREE_WIDTH = 8
DEFAULT_DRAFT_DEPTH = 32
MAX_DRAFT_TOKENS = 1024
MIN_DRAFT_WINDOW = 16

SequenceBias = tuple[tuple[tuple[int, ...], float], ...]


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
    logprobs: bool | int = False  # True: of the emitted tokens; k: of the k likeliest as well
    n: int = 1  # sequences to return, of seeds seed, seed + 1, ...; of beam search its best n
    num_beams: int = 1  # above 1: beam search, with a temperature beam-search sampling
    length_penalty: float = 1.0  # (beams) a sequence's score is its sum / length^length_penalty
    early_stopping: bool | str = False  # (beams) True, False or "never"

    def __post_init__(self) -> None:
        for name, value in normalised(self).items():
            object.__setattr__(self, name, value)  # tuples for lists, once, before validation
        validate(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def n_top_logprobs(self) -> int:
        """Likeliest tokens whose log-probabilities are wanted at every position."""
        return 0 if isinstance(self.logprobs, bool) else self.logprobs

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
        refuse_unknown(overrides, type(self))
        return dataclasses.replace(self, **overrides)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Parameters from a mapping of option names; unknown names are refused."""
        refuse_unknown(options, cls)
        return cls(**options)

    @classmethod
    def from_generation_config(cls, config: GenerationConfig | Mapping[str, Any]) -> SamplingParams:
        """Parameters that give what `generate` gives with this configuration.

        A mapping is read like the content of a `generation_config.json`. Raises ConfigError for
        options that speculative decoding cannot honour exactly, instead of ignoring them.
        """
        from specdec.sampling.hf_config import options_from

        return cls(**options_from(config))

    def to_generation_config(self) -> GenerationConfig:
        """The transformers configuration with which `generate` does the same (imports torch)."""
        from specdec.sampling.hf_config import to_generation_config

        return to_generation_config(self)


@dataclass(frozen=True)
class SpecConfig:
    """How drafts are made and accepted. Whatever is None is chosen by the policy at run time.

    `acceptance="match"` samples the target's token first and follows it through the tree, so the
    output does not depend on the draft. `"rejection"` is the textbook rule for one sampled chain,
    `"block"` judges such a chain as a whole. `accept_threshold` makes "match" put up with draft
    tokens to which the target gives at least this probability: lossy, and off unless asked for.
    """

    spec_type: tuple[str, ...] = SPEC_TYPES  # () = plain decoding
    num_draft_tokens: int | None = None  # nodes of a tree, its root not counted
    tree_width: int | None = None  # children of one node
    draft_depth: int | None = None
    acceptance: str = "match"
    accept_threshold: float | None = None  # in (0, 1]; None is lossless
    draft_ahead: str = "auto"  # draft while the target's pass runs; a drawn chain never is
    draft_window: int | None = None  # recent tokens that a draft model is shown; None = all

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec_type", parse_spec_type(self.spec_type))
        if self.acceptance not in ACCEPTANCE_RULES:
            raise ConfigError(
                f"acceptance is {self.acceptance!r}, must be one of {', '.join(ACCEPTANCE_RULES)}"
            )
        if self.draft_ahead not in DRAFT_AHEAD_MODES:
            modes = ", ".join(DRAFT_AHEAD_MODES)
            raise ConfigError(f"draft_ahead is {self.draft_ahead!r}, must be one of {modes}")
        _check("num_draft_tokens", self.num_draft_tokens, int, 0, MAX_DRAFT_TOKENS)
        _check("tree_width", self.tree_width, int, 1, MAX_DRAFT_TOKENS)
        _check("draft_depth", self.draft_depth, int, 1, MAX_DRAFT_TOKENS)
        _check("accept_threshold", self.accept_threshold, float, 0.0, 1.0, open_low=True)
        _check("draft_window", self.draft_window, int, MIN_DRAFT_WINDOW)
        if self.draws_chains and (self.tree_width or 1) > 1:
            raise ConfigError(
                f"acceptance {self.acceptance!r} verifies one chain, but tree_width is "
                f"{self.tree_width}: leave tree_width unset or choose acceptance 'match'"
            )
        if self.draws_chains and self.accept_threshold is not None:
            raise ConfigError(
                f"accept_threshold is {self.accept_threshold}, but acceptance {self.acceptance!r} "
                "decides by a draft's own probabilities: use accept_threshold with 'match'"
            )

    @property
    def draws_chains(self) -> bool:
        """Whether the rule needs one chain whose tokens were drawn from a known distribution."""
        return self.acceptance in CHAIN_RULES

    @property
    def is_lossless(self) -> bool:
        """Whether the output is the target's own, as it always is without drafts."""
        return self.accept_threshold is None or not self.drafters

    @property
    def drafters(self) -> tuple[str, ...]:
        """The kinds of draft in use: a drawn chain comes from one source, the model first."""
        return self.spec_type[:1] if self.draws_chains else self.spec_type

    @property
    def width(self) -> int:
        return 1 if self.draws_chains else self.tree_width or DEFAULT_TREE_WIDTH

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
