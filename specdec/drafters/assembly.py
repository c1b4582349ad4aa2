"""Assemble the drafters of a sequence from those that its session has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.contract.backend import Backend
from backends.contract.prefix_cache import PrefixCache
from specdec.config import SpecConfig
from specdec.drafters.assistant import AssistantDrafter
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.candidates import CandidateRanker, NoiseRows, noise_positions
from specdec.drafters.dflash import DFlashDrafter
from specdec.drafters.grammar import GrammarDrafter, within_grammar
from specdec.drafters.head import HeadDrafter
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import MatchRates, NgramDrafter
from specdec.sampling.context_window import ContextWindow
from specdec.sampling.sampler import Sampler
from specdec.verification.tree import DraftTree


class NoDrafter(Drafter):
    """Drafter without proposals: plain decoding."""

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return DraftTree(context_ids[-1])


class Drafters:
    """Factory of the drafters of a session's sequences.

    Args:
        draft: the draft model, if there is one.
        prefix_cache: the draft's KV.
        window: part of a context that the draft's cache contains.
        max_context: maximum context of the target.
        num_seqs: maximum number of sequences that share a pass.
        target_window: part of a context that the target's cache contains.
    """

    def __init__(
        self,
        draft: Backend | None,
        prefix_cache: PrefixCache | None,
        window: ContextWindow,
        max_context: int,
        num_seqs: int,
        target_window: ContextWindow = ContextWindow(),  # noqa: B008 (immutable)
    ) -> None:
        self._draft, self._prefix_cache, self._window = draft, prefix_cache, window
        self._max_context, self._target_window = max_context, target_window
        self._match_rates = MatchRates()  # hit rates of n-grams, shared by all sequences
        self._noise = NoiseRows(noise_positions(num_seqs))

    def for_sequence(self, sampler: Sampler, spec: SpecConfig, rng: np.random.Generator) -> Drafter:
        """Return a sequence's drafter, for its sampler; rng: draws for the chain rules."""
        drafters: list[Drafter] = []
        if "draft" in spec.drafters and self._draft is not None:
            chain = (sampler, rng) if spec.draws_chains else None
            n_tokens = min(sampler.n_tokens, self._draft.vocab_size)
            ranker = CandidateRanker.for_target(sampler, n_tokens, self._noise)
            drafters.append(self._of_draft(self._draft, n_tokens, chain, ranker))
        if "ngram" in spec.drafters:
            ngram = NgramDrafter(rates=self._match_rates, window=self._target_window)
            drafters.append(within_grammar(ngram, sampler.grammar))
        if not drafters:
            return NoDrafter()
        if sampler.grammar is not None and not spec.draws_chains:
            drafters.append(
                GrammarDrafter(
                    sampler.grammar.fork(),
                    sampler.n_tokens,
                    self._max_context,
                    self._target_window,
                )
            )
        return drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)

    def _of_draft(
        self,
        draft: Backend,
        n_tokens: int,
        chain: tuple[Sampler, np.random.Generator] | None,
        ranker: CandidateRanker,
    ) -> Drafter:
        cache = self._prefix_cache
        if draft.masked_block is not None:
            return DFlashDrafter(draft, n_tokens, chain=chain, ranker=ranker, prefix_cache=cache)
        kind, window = ModelDrafter, self._window
        if draft.takes_hidden_states:  # of tokens that the target sees
            kind = AssistantDrafter if draft.attends_to_target else HeadDrafter
            window = self._target_window
        return kind(draft, n_tokens, chain=chain, ranker=ranker, window=window, prefix_cache=cache)
