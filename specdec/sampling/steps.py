"""Which processors a SamplingParams switches on, in the order of transformers' `generate`.

transformers builds this list in a private method that needs a model; here it is built from the
public classes. Every step has a torch form (transformers' class); most have a numpy form too, so
that a run without torch can sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from specdec.sampling import processors as np_forms
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import Processor

# The order of GenerationMixin._get_logits_processor, transformers 5.17 to 5.23.
ORDER = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "extra",
    "temperature",
    "top_h",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "renormalize_logits",
)
_WARPERS = frozenset(ORDER[ORDER.index("temperature") : ORDER.index("renormalize_logits")])
_NEED_EOS = frozenset({"min_length", "min_tokens", "exponential_decay_length_penalty"})
_OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "typical_p": 1.0,
}


@dataclass(frozen=True)
class PipelineContext:
    """What the processors are made from: options, and what is known of prompt and model."""

    params: SamplingParams
    prompt_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def begin_length(self) -> int:
        """Prefix length at which begin_suppress_tokens acts (one later after a forced BOS)."""
        is_after_bos = self.prompt_length <= 1 and self.params.forced_bos_token_id is not None
        return self.prompt_length + int(is_after_bos)

    @property
    def min_tokens_to_keep(self) -> int:
        """Tokens that no warper removes: beams must be able to go on where every EOS is likely."""
        return 1 if self.params.num_beams == 1 else 1 + max(1, len(self.eos_token_ids))

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.params.token_limit(self.prompt_length)


def active_steps(context: PipelineContext, *, has_extra: bool = False) -> Iterator[str]:
    """Names from ORDER that change something for these parameters."""
    for name in ORDER:
        if name == "extra":
            if has_extra:
                yield name
        elif _is_active(name, context):
            yield name


def _is_active(name: str, context: PipelineContext) -> bool:
    value = getattr(context.params, name)
    if name in _WARPERS and context.params.is_greedy:
        return False
    if name in _NEED_EOS and not context.eos_token_ids:
        return False  # a model without an end-of-sequence token has nothing to hold back
    if name in ("forced_bos_token_id", "top_h"):
        return value is not None
    return value != _OFF[name] if name in _OFF else bool(value)


def numpy_form(name: str, context: PipelineContext) -> Processor | None:
    """The step in numpy, or None where only transformers has it."""
    maker = _NUMPY.get(name)
    return None if maker is None else maker(context)


def _numpy_min_length(context: PipelineContext, shortest: int) -> Processor:
    return np_forms.when_length(lambda n: n < shortest, np_forms.ban(context.eos_token_ids))


_NUMPY: dict[str, Callable[[PipelineContext], Processor]] = {
    "repetition_penalty": lambda c: np_forms.repetition_penalty(c.params.repetition_penalty),
    "no_repeat_ngram_size": lambda c: np_forms.no_repeat_ngram(c.params.no_repeat_ngram_size),
    "min_length": lambda c: _numpy_min_length(c, c.params.min_length),
    "min_tokens": lambda c: _numpy_min_length(c, c.prompt_length + c.params.min_tokens),
    "forced_bos_token_id": lambda c: np_forms.when_length(
        lambda n: n == 1, np_forms.force([c.params.forced_bos_token_id or 0])
    ),
    "forced_eos_token_id": lambda c: np_forms.when_length(
        lambda n: n == c.max_length - 1, np_forms.force(c.params.forced_eos_token_id or ())
    ),
    "remove_invalid_values": lambda c: np_forms.remove_invalid(),
    "exponential_decay_length_penalty": lambda c: np_forms.exponential_decay(
        _decay(c)[0] + c.prompt_length, _decay(c)[1], c.eos_token_ids
    ),
    "suppress_tokens": lambda c: np_forms.ban(c.params.suppress_tokens),
    "begin_suppress_tokens": lambda c: np_forms.when_length(
        lambda n: n == c.begin_length, np_forms.ban(c.params.begin_suppress_tokens)
    ),
    "temperature": lambda c: np_forms.temperature(c.params.temperature),
    "top_k": lambda c: np_forms.top_k(c.params.top_k, c.min_tokens_to_keep),
    "top_p": lambda c: np_forms.top_p(c.params.top_p, c.min_tokens_to_keep),
    "min_p": lambda c: np_forms.min_p(c.params.min_p, c.min_tokens_to_keep),
    "typical_p": lambda c: np_forms.typical_p(c.params.typical_p, c.min_tokens_to_keep),
    "epsilon_cutoff": lambda c: np_forms.epsilon_cutoff(
        c.params.epsilon_cutoff, c.min_tokens_to_keep
    ),
    "renormalize_logits": lambda c: np_forms.normalise(),
}


def torch_form(name: str, context: PipelineContext) -> Any:
    """The step as transformers' own class (imports torch and transformers)."""
    import transformers

    class_name, arguments = _TRANSFORMERS[name]
    return getattr(transformers, class_name)(**arguments(context))


def _decay(context: PipelineContext) -> tuple[int, float]:
    return context.params.exponential_decay_length_penalty or (0, 1.0)


def _eos(context: PipelineContext) -> list[int]:
    return list(context.eos_token_ids)


def _keeping(context: PipelineContext) -> dict[str, int]:
    return {"min_tokens_to_keep": context.min_tokens_to_keep}


_TRANSFORMERS: dict[str, tuple[str, Callable[[PipelineContext], dict[str, Any]]]] = {
    "sequence_bias": (
        "SequenceBiasLogitsProcessor",
        lambda c: {"sequence_bias": [[list(ids), b] for ids, b in c.params.sequence_bias]},
    ),
    "repetition_penalty": (
        "RepetitionPenaltyLogitsProcessor",
        lambda c: {"penalty": float(c.params.repetition_penalty)},
    ),
    "no_repeat_ngram_size": (
        "NoRepeatNGramLogitsProcessor",
        lambda c: {"ngram_size": c.params.no_repeat_ngram_size},
    ),
    "bad_words_ids": (
        "NoBadWordsLogitsProcessor",
        lambda c: {
            "bad_words_ids": [list(word) for word in c.params.bad_words_ids],
            "eos_token_id": _eos(c) or None,
        },
    ),
    "min_length": (
        "MinLengthLogitsProcessor",
        lambda c: {"min_length": c.params.min_length, "eos_token_id": _eos(c)},
    ),
    "min_tokens": (
        "MinNewTokensLengthLogitsProcessor",
        lambda c: {
            "prompt_length_to_skip": c.prompt_length,
            "min_new_tokens": c.params.min_tokens,
            "eos_token_id": _eos(c),
        },
    ),
    "forced_bos_token_id": (
        "ForcedBOSTokenLogitsProcessor",
        lambda c: {"bos_token_id": c.params.forced_bos_token_id},
    ),
    "forced_eos_token_id": (
        "ForcedEOSTokenLogitsProcessor",
        lambda c: {
            "max_length": c.max_length,
            "eos_token_id": list(c.params.forced_eos_token_id or ()),
        },
    ),
    "remove_invalid_values": ("InfNanRemoveLogitsProcessor", lambda c: {}),
    "exponential_decay_length_penalty": (
        "ExponentialDecayLengthPenalty",
        lambda c: {
            "exponential_decay_length_penalty": _decay(c),
            "eos_token_id": _eos(c),
            "input_ids_seq_length": c.prompt_length,
        },
    ),
    "suppress_tokens": (
        "SuppressTokensLogitsProcessor",
        lambda c: {"suppress_tokens": list(c.params.suppress_tokens)},
    ),
    "begin_suppress_tokens": (
        "SuppressTokensAtBeginLogitsProcessor",
        lambda c: {
            "begin_suppress_tokens": list(c.params.begin_suppress_tokens),
            "begin_index": c.begin_length,
        },
    ),
    "temperature": ("TemperatureLogitsWarper", lambda c: {"temperature": c.params.temperature}),
    "top_h": ("TopHLogitsWarper", lambda c: {"top_h": c.params.top_h}),
    "top_k": ("TopKLogitsWarper", lambda c: {"top_k": c.params.top_k, **_keeping(c)}),
    "top_p": ("TopPLogitsWarper", lambda c: {"top_p": c.params.top_p, **_keeping(c)}),
    "min_p": ("MinPLogitsWarper", lambda c: {"min_p": c.params.min_p, **_keeping(c)}),
    "typical_p": (
        "TypicalLogitsWarper",
        lambda c: {"mass": float(c.params.typical_p), **_keeping(c)},
    ),
    "epsilon_cutoff": (
        "EpsilonLogitsWarper",
        lambda c: {"epsilon": c.params.epsilon_cutoff, **_keeping(c)},
    ),
    "eta_cutoff": ("EtaLogitsWarper", lambda c: {"epsilon": c.params.eta_cutoff, **_keeping(c)}),
    "renormalize_logits": ("LogitNormalization", lambda c: {}),
}
