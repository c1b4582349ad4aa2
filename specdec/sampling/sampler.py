"""Sampler: the target's token from its logits: processors, then argmax(log p + Gumbel noise)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.checks import ConfigError, FieldName
from specdec.grammar.state import GrammarState
from specdec.sampling.gumbel import gumbel_at
from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.processors import NEG_INF, SamplingError, Scores, log_softmax


class Sampler:
    """Chooses the target's tokens for one generation.

    Args:
        params: the caller's parameters.
        n_tokens: the tokenizer's length; ids beyond it (padding of the vocabulary) are never
            chosen, nor seen by the processors.
        eos_token_ids: the model's end-of-sequence ids, unless `params` has its own.
        prompt_length: tokens of the prompt, after which some processors begin to count.
        logits_processors: the caller's transformers LogitsProcessors (see LogitsPipeline).
        grammar: initial grammar state, if `params` have a constraint.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        n_tokens: int,
        eos_token_ids: Iterable[int] = (),
        prompt_length: int = 0,
        logits_processors: Sequence[Any] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        eos = tuple(eos_token_ids)
        _check_biased_ids(params, n_tokens)
        if params.constraint is not None and grammar is None:
            raise ValueError(f"no grammar state was given for {params.constraint.kind}")
        self.params = params
        self.n_tokens = n_tokens
        self.grammar = grammar
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.stop_tokens = params.resolve_stop_tokens(eos)
        self._pipeline = LogitsPipeline(
            params, prompt_length=prompt_length, eos_token_ids=eos, extra=logits_processors
        )

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy

    def scores(self, prefix_ids: Sequence[int], logits: NDArray[np.float32]) -> Scores:
        """Return processed scores without padding, float32 [min(vocab, n_tokens)].

        Raises SamplingError if nothing can be chosen: NaN or +inf, or every token ruled out.
        """
        row = self._real(logits)
        if self.grammar is None:
            scores = self._pipeline(prefix_ids, row)
        else:
            scores = self._constrained(self.grammar, prefix_ids, row)
        best = scores.max() if len(scores) else np.float32(-np.inf)
        if not np.isfinite(best):  # max() propagates NaN
            raise SamplingError(_describe_bad_row(row, len(prefix_ids)))
        return scores

    def _constrained(self, grammar: GrammarState, prefix_ids: Sequence[int], row: Scores) -> Scores:
        """Return the processed scores of tokens that the grammar allows; others are -inf.

        The mask is applied first, so that top-k, top-p and the like choose among allowed tokens,
        and last, so that no processor revives others. At the grammar's end only end tokens are
        allowed, and no processor is applied.
        """
        allowed = grammar.allowed(prefix_ids, len(row))
        masked = np.where(allowed, row, NEG_INF)
        if grammar.ends_only(allowed):
            return masked
        return np.where(allowed, self._pipeline(prefix_ids, masked), NEG_INF)

    def beam_log_probs(
        self, prefix_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Return processed log-probabilities for beam search, float32 [min(vocab, n_tokens)].

        Processors get log-probabilities here and logits elsewhere, as in `generate`. A row
        without any possible token is no error, because other beams go on.
        """
        row = self._real(logits)
        with np.errstate(invalid="ignore"):
            log_p = log_softmax(row).astype(np.float32)
        scores = self._pipeline(prefix_ids, log_p)
        if np.isnan(scores).any() or np.isposinf(scores).any():
            raise SamplingError(_describe_bad_row(row, len(prefix_ids)))
        return scores

    def log_probs(
        self, prefix_ids: Sequence[int], logits: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return log p of the processed distribution, float64 [vocab], -inf for ruled-out tokens.

        At temperature 0 this is the distribution before the argmax, not a one-hot row.
        """
        scores = self.scores(prefix_ids, logits).astype(np.float64)
        log_p = np.full(len(logits), -np.inf)
        with np.errstate(divide="ignore"):
            log_p[: len(scores)] = log_softmax(scores)
        return log_p

    def probs(self, prefix_ids: Sequence[int], logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return p for the chain rules, float64 [vocab], sum 1; one-hot at temperature 0."""
        if self.is_greedy:
            one_hot = np.zeros(len(logits))
            one_hot[int(self.scores(prefix_ids, logits).argmax())] = 1.0
            return one_hot
        p = np.exp(self.log_probs(prefix_ids, logits))
        return np.asarray(p / p.sum())

    def choose(self, prefix_ids: Sequence[int], logits: NDArray[np.float32], position: int) -> int:
        """Return the target's token at an absolute position: argmax(log p + g), g = 0 when greedy.

        Scores are used in place of log p: they differ by a constant only.
        """
        scores = self.scores(prefix_ids, logits)
        if self.is_greedy:
            return int(scores.argmax())
        alive = np.flatnonzero(scores != NEG_INF)
        noise = gumbel_at(self.seed, position, alive)
        return int(alive[(scores[alive].astype(np.float64) + noise).argmax()])

    def _real(self, logits: NDArray[np.float32]) -> Scores:
        """Return the row without the vocabulary's padding."""
        return np.asarray(logits, dtype=np.float32)[: self.n_tokens]

    def chooser(
        self,
        prefix_of: Callable[[int], Sequence[int]],
        logits_of: Callable[[int], NDArray[np.float32]],
    ) -> Callable[[int], int]:
        """Return `choose` as a function of a tree node, for `verify_match`.

        The position of the token after a node is the length of its prefix.
        """

        def choose_after(node: int) -> int:
            prefix = prefix_of(node)
            return self.choose(prefix, logits_of(node), position=len(prefix))

        return choose_after


def _check_biased_ids(params: SamplingParams, n_tokens: int) -> None:
    """Raise ConfigError for biased ids outside the vocabulary."""
    biased = {
        "bad_words_ids": params.bad_words_ids,
        "sequence_bias": tuple(ids for ids, _ in params.sequence_bias),
        "logit_bias": tuple((token,) for token, _ in params.logit_bias),
    }
    for name, sequences in biased.items():
        highest = max((max(ids) for ids in sequences), default=0)
        if highest >= n_tokens:
            raise ConfigError(
                FieldName(name),
                f" holds token id {highest}, but the vocabulary has {n_tokens} tokens: give ids "
                "of this model's tokenizer",
            )


def _describe_bad_row(row: Scores, position: int) -> str:
    if np.isnan(row).any() or np.isposinf(row).any():
        n_bad = int((~np.isfinite(row)).sum())
        return (
            f"the model's logits at position {position} have {n_bad} NaN or infinite entries: "
            "check the model's files, or go on regardless with SamplingParams's "
            "remove_invalid_values"
        )
    return (
        f"every token is ruled out at position {position}: the bans, forced tokens and constraints "
        "of the sampling parameters contradict each other"
    )
