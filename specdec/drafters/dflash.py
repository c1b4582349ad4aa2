"""DFlashDrafter: a head that fills a block of masked positions in one pass grows a tree (DFlash).

The head's cache has the target's hidden states of all tokens before the pending one:

    context       t0  t1  t2  t3  t4      t4 is pending: the tree's root
    target         h0  h1  h2  h3
    first pass             h2  h3         those that the cache lacks; no logits
    second pass                    t4 mask mask mask      logits of t5, t6 and t7

Both passes are one run of the draft for the policy: a tree has as many levels as the block has
masks, and takes the same time whatever its depth (specdec/drafters/marginals.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import PREFIX, Backend, BackendError
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput, SequenceKV, SequenceOutput
from backends.contract.source import MAX_PROMPT_STATES
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps, run_steps
from specdec.drafters.candidates import CandidateRanker, Candidates
from specdec.drafters.chain import DrawnChain
from specdec.drafters.marginals import CandidatesAfter, Transitions, best_tree
from specdec.drafters.state_buffer import StateBuffer
from specdec.sampling.sampler import Sampler
from specdec.verification.tree import DraftTree

Marginals: TypeAlias = NDArray[np.float32] | Transitions
"""Logits [n, vocab] of the next n tokens, or those of DFlash 2."""
_MIN_BLOCK_SIZE = 2
"""Pending token and one mask: blocks are cut where the head's context ends."""


class DFlashDrafter(Drafter):
    """Drafter with a head whose backend has a `masked_block` (see the module's docstring).

    The cache may begin anywhere in the context: with the last states of a prompt, after a prefix
    that the target reused, or anew where the head's own context is full. There is no parallel
    drafting: the states that a block needs are known after the target's pass.

    Args: see ModelDrafter.
    """

    max_hidden_states = MAX_PROMPT_STATES

    def __init__(
        self,
        backend: Backend,
        n_tokens: int,
        *,
        chain: tuple[Sampler, np.random.Generator] | None = None,
        ranker: CandidateRanker | None = None,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        assert backend.masked_block is not None, "the head fills blocks"
        self._backend, self._block = backend, backend.masked_block
        self._prefix_cache = prefix_cache or PrefixCache(backend, 0)
        self._n_tokens = min(n_tokens, backend.vocab_size)
        self._chain = chain
        self._ranker = ranker or CandidateRanker(self._n_tokens)
        self._kv: SequenceKV | None = None
        self._begin = 0
        """Position of the first token in the head's cache."""
        self._states = StateBuffer()

    def take_hidden_states(self, position: int, states: NDArray[np.float32]) -> None:
        self._states.add(position, states)

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        return len(self._states)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return run_steps(self.propose_in_steps(context_ids, limits))

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        """Propose a tree. Of the limits, `min_level_probability` decides only whether the head is
        run: all levels come from one pass, whose level has the probability 1."""
        depth = min(limits.max_depth, limits.max_nodes, self._block.size - 1)
        output = None
        if depth > 0 and limits.min_level_probability <= 1.0:
            output = yield from self._run_block(context_ids)
        if output is None:
            return DraftTree(context_ids[-1])
        rows: Marginals = output.logits[:depth]
        if self._block.top_k:
            rows = Transitions(output.hidden_states[:depth], self._block.top_k)
        if self._chain is not None:
            chain = DrawnChain(context_ids, self._n_tokens, *self._chain)
            tree = self._draw_chain(rows, chain)
        else:
            after = self._candidates(context_ids, rows, limits.width)
            tree = best_tree(context_ids[-1], after, limits.max_nodes, len(rows))
        tree.n_runs, tree.n_run_nodes = 1, self._block.size
        return tree

    def reset(self) -> None:
        self._states.clear()
        kv, self._kv = self._kv, None
        if kv is not None:
            self._prefix_cache.drop(kv)

    # --- the head's passes ----------------------------------------------------------------------

    def _run_block(self, context_ids: Sequence[int]) -> DraftSteps[SequenceOutput | None]:
        """Return the head's output for the next tokens; None if states or capacity are lacking."""
        n_known = len(context_ids) - 1
        if self._states.end != n_known or not self._has_begun():
            return None
        if not (yield from self._add_states(context_ids)) or not self._sequence.n_committed:
            return None
        size = min(self._block.size, self._backend.max_context - self._sequence.n_committed)
        token_ids = [context_ids[-1]] + [self._block.mask_token_id] * (size - 1)
        first = self._sequence.next_node_id
        parents = [PREFIX, *range(first, first + size - 1)]
        self._prefix_cache.ensure_capacity(self._sequence, size)
        masked = range(1, size)
        states_at = masked if self._block.top_k else ()
        output = yield SequenceInput(self._sequence, token_ids, parents, masked, states_at)
        if output is not None:
            self._sequence.commit([])  # drops the block
        return output

    def _add_states(self, context_ids: Sequence[int]) -> DraftSteps[bool]:
        """Bring the cache up to the pending token; return whether there was capacity for it."""
        n_free = self._backend.max_context - _MIN_BLOCK_SIZE
        if self._begin + self._sequence.n_committed != self._states.start or (
            self._sequence.n_committed + len(self._states) > n_free
        ):
            self._sequence.rollback(0)
            self._states.keep_last(max(1, n_free // 2))
            self._begin = self._states.start
        if len(self._states):
            chunk = context_ids[self._states.start : self._states.end]
            self._prefix_cache.ensure_capacity(self._sequence, len(chunk) + self._block.size)
            states = self._states.stacked()
            output = yield SequenceInput(self._sequence, chunk, logits_at=[], hidden_states=states)
            if output is None:
                return False
            self._states.mark_used()
        return True

    @property
    def _sequence(self) -> SequenceKV:
        assert self._kv is not None, "it begins with the first proposal"
        return self._kv

    def _has_begun(self) -> bool:
        """Begin the KV if needed; return False if other sequences leave no capacity for it."""
        if self._kv is None:
            try:
                self._kv = self._prefix_cache.allocate([], skips_cache=True)
            except BackendError:
                return False
            self._begin = self._states.start
        return True

    # --- proposals ------------------------------------------------------------------------------

    def _candidates(
        self, context_ids: Sequence[int], rows: Marginals, width: int
    ) -> CandidatesAfter:
        """Return the function of `best_tree`. Each row is ranked once, unless a grammar allows
        other tokens on each path."""
        n_context, ranker = len(context_ids), self._ranker
        if isinstance(rows, Transitions):

            def after_token(path: Sequence[int]) -> Candidates:
                prefix = () if ranker.grammar is None else [*context_ids, *path]
                return ranker.rank_among(*rows.after(path), n_context + len(path), width, prefix)

            return after_token
        if ranker.grammar is None:
            places = range(n_context, n_context + len(rows))
            ranked = ranker.rank(rows, places, width)
            return lambda path: ranked[len(path)]

        def after(path: Sequence[int]) -> Candidates:
            n = len(path)
            return ranker.rank(rows[n : n + 1], [n_context + n], width, [[*context_ids, *path]])[0]

        return after

    def _draw_chain(self, rows: Marginals, chain: DrawnChain) -> DraftTree:
        """Draw a token from each marginal."""
        for depth in range(len(rows)):
            if not chain.draw(self._row(rows, chain.token_ids, depth)):
                break
        return chain.tree

    def _row(self, rows: Marginals, path: Sequence[int], depth: int) -> NDArray[np.float32]:
        """Return logits [vocab] of the token after this path."""
        if not isinstance(rows, Transitions):
            row: NDArray[np.float32] = rows[depth]
            return row
        tokens, scores = rows.after(path)
        row = np.full(self._backend.vocab_size, -np.inf, dtype=np.float32)
        row[tokens] = scores
        return row
