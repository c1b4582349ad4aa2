"""From the target's logits to its token: processors, then the Gumbel-max choice.

The choice is argmax(log p + g), with standard Gumbel noise g that is a function of (seed, absolute
position, token id) and of nothing else. That is an exact sample of p, and it makes a sampled text a
function of the target and the seed: the draft, the tree, the batch and the memory budget have no
influence on it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offload.errors import SpecdecError
from specdec.checks import ConfigError
from specdec.sampling import processors as np_forms
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import Ids, Processor, Scores
from specdec.sampling.steps import ORDER, PipelineContext, active_steps, numpy_form, torch_form

if TYPE_CHECKING:
    from transformers import LogitsProcessorList

_BLOCK = 4  # numbers that Philox makes of one count
SMALLEST_UNIFORM = 2.0**-54  # half of the generator's resolution, in place of an exact 0


class SamplingError(SpecdecError):
    """A row of logits from which no token can be chosen."""


def _uniforms(seed: int, position: int, n: int, n_skipped: int = 0) -> NDArray[np.float64]:
    """`n` uniforms in (0, 1) of the stream keyed by (seed, position), after `n_skipped`, a multiple
    of the generator's block."""
    key = np.array([seed, position], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=n_skipped // _BLOCK)
    uniforms = np.random.Generator(philox).random(n)
    return np.maximum(uniforms, SMALLEST_UNIFORM, out=uniforms)


def gumbel_noise(seed: int, position: int, n: int) -> NDArray[np.float64]:
    """Standard Gumbel noise of the tokens 0..n-1 at an absolute position, float64 [n].

    Prefix-stable: a token's noise does not depend on n, so that a draft whose vocabulary is padded
    to another size sees the same noise. `seed` and `position` are 64-bit words, both ≥ 0.
    """
    return -np.log(-np.log(_uniforms(seed, position, n)))


def gumbel_at(seed: int, position: int, token_ids: ArrayLike) -> NDArray[np.float64]:
    """`gumbel_noise` of these tokens only: the two logarithms are most of its cost."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size == 0:
        return np.empty(0, dtype=np.float64)
    start = int(ids.min()) // _BLOCK * _BLOCK
    uniforms = _uniforms(seed, position, int(ids.max()) + 1 - start, start)
    return -np.log(-np.log(uniforms[ids - start]))


def fresh_seed() -> int:
    """A random seed, for a generation whose caller gave none."""
    return secrets.randbits(63)


class LogitsPipeline:
    """The active processors of a SamplingParams, in transformers' order.

    Common ones run in numpy; the rest are transformers' own classes, for which torch is imported
    when the pipeline is made. `extra` takes further transformers LogitsProcessors of the caller,
    placed where `generate(logits_processor=...)` puts them: before the warpers. They see every
    position once per walk, with its prefix; they must not keep state between calls.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int = 0,
        eos_token_ids: Iterable[int] = (),
        extra: Sequence[Any] = (),
        use_numpy: bool = True,
    ) -> None:
        context = PipelineContext(params, prompt_length, params.resolve_eos(eos_token_ids))
        build = numpy_form if use_numpy else _adapted
        self.step_names = tuple(active_steps(context, has_extra=bool(extra)))
        self._steps: list[Processor] = []
        for name in self.step_names:
            if name == "extra":
                self._steps.extend(_adapt(processor) for processor in extra)
            else:
                self._steps.append(build(name, context) or _adapted(name, context))

    def __call__(self, prefix_ids: Sequence[int] | Ids, scores: Scores) -> Scores:
        """Processed scores float32 [vocab] of one row; the row itself is left as it is."""
        if not self._steps:
            return scores
        prefix = np.asarray(prefix_ids, dtype=np.int64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            for step in self._steps:
                scores = step(prefix, scores)
        return scores


def _adapted(name: str, context: PipelineContext) -> Processor:
    return _adapt(torch_form(name, context))


def _adapt(processor: Any) -> Processor:
    """A transformers LogitsProcessor as a function of numpy arrays."""
    import torch

    def process(prefix: Ids, scores: Scores) -> Scores:
        ids = torch.from_numpy(np.ascontiguousarray(prefix))[None]
        row = torch.from_numpy(np.array(scores, dtype=np.float32))[None]
        return np.asarray(processor(ids, row)[0].numpy(), dtype=np.float32)

    return process


def transformers_processors(
    params: SamplingParams, *, prompt_length: int, eos_token_ids: Iterable[int] = ()
) -> LogitsProcessorList:
    """The same pipeline as a LogitsProcessorList of transformers' public classes."""
    from transformers import LogitsProcessorList

    context = PipelineContext(params, prompt_length, params.resolve_eos(eos_token_ids))
    return LogitsProcessorList([torch_form(name, context) for name in active_steps(context)])


class Sampler:
    """Chooses the target's tokens for one generation.

    Args:
        params: what the caller asked for.
        n_tokens: the tokenizer's length; ids from there on (padding rows of the vocabulary) are
            never chosen, nor seen by the processors.
        eos_token_ids: the model's end-of-sequence ids, unless `params` has its own.
        prompt_length: tokens of the prompt, where some processors begin to count.
        logits_processors: further transformers LogitsProcessors (see LogitsPipeline).
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_tokens: int,
        eos_token_ids: Iterable[int] = (),
        prompt_length: int = 0,
        logits_processors: Sequence[Any] = (),
    ) -> None:
        eos = tuple(eos_token_ids)
        _check_biased_ids(params, n_tokens)
        self.params = params
        self.n_tokens = n_tokens
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.stop_tokens = params.resolve_stop_tokens(eos)
        self._pipeline = LogitsPipeline(
            params, prompt_length=prompt_length, eos_token_ids=eos, extra=logits_processors
        )

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    def scores(self, prefix_ids: Sequence[int], logits: NDArray[np.float32]) -> Scores:
        """Processed scores of the real tokens, float32 [min(vocab, n_tokens)].

        Raises SamplingError if nothing can be chosen: NaN or +inf, or every token ruled out.
        """
        row = self._real(logits)
        scores = self._pipeline(prefix_ids, row)
        best = scores.max() if len(scores) else np.float32(-np.inf)
        if not np.isfinite(best):  # max() propagates NaN
            raise SamplingError(_describe_bad_row(row, len(prefix_ids)))
        return scores

    def beam_log_probs(
        self, prefix_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """What beam search adds up: processed log-probabilities float32 [min(vocab, n_tokens)].

        The processors see log-probabilities here and logits elsewhere, as in `generate`; a row
        without any possible token is no error, because other beams go on.
        """
        row = self._real(logits)
        with np.errstate(invalid="ignore"):
            log_p = np_forms.log_softmax(row).astype(np.float32)
        scores = self._pipeline(prefix_ids, log_p)
        if np.isnan(scores).any() or np.isposinf(scores).any():
            raise SamplingError(_describe_bad_row(row, len(prefix_ids)))
        return scores

    def log_probs(
        self, prefix_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """log p of the processed distribution, float64 [vocab], -inf for what is ruled out.

        At temperature 0 this is the distribution that the argmax is taken of, not a one-hot row.
        """
        scores = self.scores(prefix_ids, logits).astype(np.float64)
        log_p = np.full(len(logits), -np.inf)
        with np.errstate(divide="ignore"):
            log_p[: len(scores)] = np_forms.log_softmax(scores)
        return log_p

    def probs(self, prefix_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """p as the rejection rule needs it, float64 [vocab], sum 1; one-hot at temperature 0."""
        if self.is_greedy:
            one_hot = np.zeros(len(logits))
            one_hot[int(self.scores(prefix_ids, logits).argmax())] = 1.0
            return one_hot
        p = np.exp(self.log_probs(prefix_ids, logits))
        return np.asarray(p / p.sum())

    def choose(self, prefix_ids: Sequence[int], logits: NDArray[np.float32], position: int) -> int:
        """The target's token at an absolute position: argmax(log p + g), g = 0 when greedy.

        Normalising log p would shift every entry by the same amount, so the scores serve as well.
        """
        scores = self.scores(prefix_ids, logits)
        if self.is_greedy:
            return int(scores.argmax())
        alive = np.flatnonzero(scores != np_forms.NEG_INF)
        noise = gumbel_at(self.seed, position, alive)
        return int(alive[(scores[alive].astype(np.float64) + noise).argmax()])

    def _real(self, logits: NDArray[np.float32]) -> Scores:
        """The row without the vocabulary's padding."""
        return np.asarray(logits, dtype=np.float32)[: self.n_tokens]

    def chooser(
        self,
        prefix_of: Callable[[int], Sequence[int]],
        logits_of: Callable[[int], NDArray[np.float32]],
    ) -> Callable[[int], int]:
        """`choose` as a function of a tree node, as `match_walk` wants it.

        The token after a node takes the position that follows its prefix: len(prefix).
        """

        def choose_after(node: int) -> int:
            prefix = prefix_of(node)
            return self.choose(prefix, logits_of(node), position=len(prefix))

        return choose_after


def _check_biased_ids(params: SamplingParams, n_tokens: int) -> None:
    """Raise ConfigError for ids that no row of logits has."""
    biased = {
        "bad_words_ids": params.bad_words_ids,
        "sequence_bias": tuple(ids for ids, _ in params.sequence_bias),
    }
    for name, sequences in biased.items():
        highest = max((max(ids) for ids in sequences), default=0)
        if highest >= n_tokens:
            raise ConfigError(
                f"{name} holds token id {highest}, but the vocabulary has {n_tokens} tokens: "
                "give ids of this model's tokenizer"
            )


def _describe_bad_row(row: Scores, position: int) -> str:
    if np.isnan(row).any() or np.isposinf(row).any():
        n_bad = int((~np.isfinite(row)).sum())
        return (
            f"the model's logits at position {position} have {n_bad} NaN or infinite entries: "
            "check the checkpoint, or set remove_invalid_values to go on regardless"
        )
    return (
        f"every token is ruled out at position {position}: the bans and forced tokens of the "
        "sampling parameters contradict each other"
    )


__all__ = [
    "ORDER",
    "LogitsPipeline",
    "Sampler",
    "SamplingError",
    "fresh_seed",
    "gumbel_at",
    "gumbel_noise",
    "transformers_processors",
]
