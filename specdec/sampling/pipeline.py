"""Logits processors of a SamplingParams, in the order of transformers' `generate`.

transformers builds this list in a private method that needs a model. Here it is numpy, so that a
run without torch can sample; the few steps without a numpy form are transformers' own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.sampling import processors
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import Ids, NumpyProcessor, Processor, SamplingError, Scores


@dataclass(frozen=True)
class PipelineContext:
    """Parameters, prompt length and end-of-sequence ids that processors are made from."""

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
        """Minimum tokens that warpers keep: beams have to go on even where every EOS is likely."""
        return 1 if self.params.num_beams == 1 else 1 + max(1, len(self.eos_token_ids))

    @property
    def max_length(self) -> int:
        return self.prompt_length + self.params.token_limit(self.prompt_length)


class LogitsPipeline:
    """The active processors of a SamplingParams.

    extra: the caller's own transformers LogitsProcessors or NumpyProcessors, applied where
    `generate(logits_processor=...)` applies them: before the warpers. They are called once per
    position that is verified, with its prefix, and must not keep state between calls.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int = 0,
        eos_token_ids: Iterable[int] = (),
        extra: Sequence[Any] = (),
    ) -> None:
        context = PipelineContext(params, prompt_length, params.resolve_eos(eos_token_ids))
        self._steps = [
            *_active(_BEFORE_WARPERS, context),
            *(item if isinstance(item, NumpyProcessor) else _adapted(item) for item in extra),
            *_active({} if params.is_greedy else _WARPERS, context),
            *_active(_AFTER_WARPERS, context),
        ]

    def __call__(self, prefix_ids: Sequence[int] | Ids, scores: Scores) -> Scores:
        """Return the processed scores, float32 [vocab], of one row, which is not changed."""
        if not self._steps:
            return scores
        prefix = np.asarray(prefix_ids, dtype=np.int64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for step in self._steps:
                scores = step(prefix, scores)
        return scores


Makers = Mapping[str, Callable[[PipelineContext], Processor]]
"""Makers of processors, by the option that switches them on."""


def _active(makers: Makers, context: PipelineContext) -> Iterator[Processor]:
    """Yield the processors that these parameters switch on."""
    for name, make in makers.items():
        value = getattr(context.params, name)
        if name in _NEED_EOS and not context.eos_token_ids:
            continue  # no end-of-sequence token to ban or raise
        if value != _OFF[name] if name in _OFF else value:
            yield make(context)


_NEED_EOS = frozenset({"min_length", "min_tokens", "exponential_decay_length_penalty"})
_OFF: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "forced_bos_token_id": None,
    "temperature": 1.0,
    "top_h": None,
    "top_p": 1.0,
    "typical_p": 1.0,
}
"""Values that switch an option off, if not falsy."""


def _of_transformers(class_name: str, **arguments: Any) -> Processor:
    """Return a processor of transformers (imports torch and transformers)."""
    import transformers

    return _adapted(getattr(transformers, class_name)(**arguments))


def _adapted(processor: Any) -> Processor:
    """Return a transformers LogitsProcessor as a function of numpy arrays."""
    import torch

    def process(prefix: Ids, scores: Scores) -> Scores:
        ids = torch.from_numpy(np.ascontiguousarray(prefix))[None]
        row = torch.from_numpy(np.array(scores, dtype=np.float32))[None]
        result = processor(ids, row)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            raise SamplingError(
                f"{_name(processor)} returned {result!r:.50}, must be a float tensor"
            )
        if result.shape != row.shape:
            raise SamplingError(
                f"{_name(processor)} returned scores of shape {list(result.shape)}, must be "
                f"{list(row.shape)} as it was given"
            )
        return np.asarray(result[0].numpy(), dtype=np.float32)

    return process


def _name(processor: Any) -> str:
    return f"logits processor {getattr(processor, '__name__', type(processor).__name__)}"


def _no_eos_before(context: PipelineContext, length: int) -> Processor:
    return processors.when_length(lambda n: n < length, processors.ban(context.eos_token_ids))


def _exponential_decay(context: PipelineContext) -> Processor:
    start, factor = context.params.exponential_decay_length_penalty or (0, 1.0)
    eos = context.eos_token_ids
    return processors.exponential_decay(context.prompt_length + start, factor, eos)


# The order of GenerationMixin._get_logits_processor, transformers 5.17 to 5.23.
_BEFORE_WARPERS: Makers = {
    "sequence_bias": lambda c: _of_transformers(
        "SequenceBiasLogitsProcessor",
        sequence_bias=[[list(ids), bias] for ids, bias in c.params.sequence_bias],
    ),
    # OpenAI's three, in vLLM's and llama.cpp's places; transformers has none of them.
    "logit_bias": lambda c: processors.logit_bias(c.params.logit_bias),
    "repetition_penalty": lambda c: processors.repetition_penalty(c.params.repetition_penalty),
    "frequency_penalty": lambda c: processors.frequency_penalty(
        c.params.frequency_penalty, c.prompt_length
    ),
    "presence_penalty": lambda c: processors.presence_penalty(
        c.params.presence_penalty, c.prompt_length
    ),
    "no_repeat_ngram_size": lambda c: processors.no_repeat_ngram(c.params.no_repeat_ngram_size),
    "bad_words_ids": lambda c: _of_transformers(
        "NoBadWordsLogitsProcessor",
        bad_words_ids=[list(word) for word in c.params.bad_words_ids],
        eos_token_id=list(c.eos_token_ids) or None,
    ),
    "min_length": lambda c: _no_eos_before(c, c.params.min_length),
    "min_tokens": lambda c: _no_eos_before(c, c.prompt_length + c.params.min_tokens),
    "forced_bos_token_id": lambda c: processors.when_length(
        lambda n: n == 1, processors.force([c.params.forced_bos_token_id or 0])
    ),
    "forced_eos_token_id": lambda c: processors.when_length(
        lambda n: n == c.max_length - 1, processors.force(c.params.forced_eos_token_id or ())
    ),
    "remove_invalid_values": lambda c: processors.remove_invalid(),
    "exponential_decay_length_penalty": _exponential_decay,
    "suppress_tokens": lambda c: processors.ban(c.params.suppress_tokens),
    "begin_suppress_tokens": lambda c: processors.when_length(
        lambda n: n == c.begin_length, processors.ban(c.params.begin_suppress_tokens)
    ),
}
_WARPERS: Makers = {
    "temperature": lambda c: processors.temperature(c.params.temperature),
    "top_h": lambda c: _of_transformers("TopHLogitsWarper", top_h=c.params.top_h),
    "top_k": lambda c: processors.top_k(c.params.top_k, c.min_tokens_to_keep),
    "top_p": lambda c: processors.top_p(c.params.top_p, c.min_tokens_to_keep),
    "min_p": lambda c: processors.min_p(c.params.min_p, c.min_tokens_to_keep),
    "typical_p": lambda c: processors.typical_p(c.params.typical_p, c.min_tokens_to_keep),
    "epsilon_cutoff": lambda c: processors.epsilon_cutoff(
        c.params.epsilon_cutoff, c.min_tokens_to_keep
    ),
    "eta_cutoff": lambda c: _of_transformers(
        "EtaLogitsWarper", epsilon=c.params.eta_cutoff, min_tokens_to_keep=c.min_tokens_to_keep
    ),
}
_AFTER_WARPERS: Makers = {"renormalize_logits": lambda c: processors.normalise()}
