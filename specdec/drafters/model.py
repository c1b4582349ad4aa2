"""ModelDrafter: a small model grows a tree of its likeliest continuations.

The draft expands the most probable nodes that it has not run yet, many at a time, as in SpecExec
(Svirschevski et al. 2024, section 4) and EAGLE-2 (Li et al. 2024, section 4): a node's score is the
product of the probabilities on its path, its estimated acceptance probability.

One tree serves a whole sequence. Its most probable part is proposed; drafting ahead grows the tree
beyond that part while the target verifies it, and the nodes below the target's own token begin the
next proposal, KV included (PEARL, Liu et al. 2024; SSD, Kumar et al. 2026).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import Backend, BackendError
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput, SequenceKV, SequenceOutput
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.batched_drafting import DraftSteps, run_steps
from specdec.drafters.candidates import CandidateRanker, Candidates
from specdec.drafters.chain import DrawnChain
from specdec.drafters.frontier import Frontier, Level, level_width
from specdec.drafters.grammar import SOURCE as GRAMMAR_SOURCE
from specdec.drafters.grammar import with_forced
from specdec.drafters.grown_tree import GrownNode, GrownTree
from specdec.sampling.context_window import ContextWindow
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

_MAX_AHEAD = 2
"""Maximum runs ahead, relative to the runs of a new tree: nodes run beyond that are hardly ever
used, and take processor time from the pass."""
_MIN_SHARE = 0.08
"""Minimum probability, relative to the likeliest node's, of nodes that are run ahead together: many
small levels find more of the likeliest nodes than few wide ones."""


class ModelDrafter(Drafter):
    """Drafter with its own model and its own KV cache.

    While it has a tree, the draft's cache contains the context, or a window of it, up to and
    including the pending token, which is the tree's root, and the KV of the nodes that were run.
    After a step the accepted nodes are committed in place. Where the target's next token was run as
    well, it becomes the root with its subtree. Otherwise the tree is dropped, and the tokens that
    the cache lacks (the last accepted leaf, the recovered or bonus token) are computed next time.

    Args:
        backend: the draft model; it outlives the drafter.
        n_tokens: size of the target's vocabulary; the draft's ids beyond it are never proposed.
        chain: (sampler, rng) to *draw* chains with, for the rejection rule; without it, trees of
            the likeliest tokens are built, for the match walk.
        ranker: ranks candidates; by default by the draft's logits.
        window: part of the context that the draft's cache contains.
        prefix_cache: source of its sequences' KV; None: nothing is cached.
    """

    def __init__(
        self,
        backend: Backend,
        n_tokens: int,
        *,
        chain: tuple[Sampler, np.random.Generator] | None = None,
        ranker: CandidateRanker | None = None,
        window: ContextWindow = ContextWindow(),  # noqa: B008 (immutable)
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._backend = backend
        self._prefix_cache = prefix_cache or PrefixCache(backend, 0)
        self._window = window
        self._n_tokens = min(n_tokens, backend.vocab_size)
        self._chain = chain
        self._ranker = ranker or CandidateRanker(self._n_tokens)
        self._limits = TreeLimits(0, 0, 1)
        self._context: Sequence[int] = ()  # up to the tree's root
        self._kv: SequenceKV | None = None
        self._tree: GrownTree | None = None
        self._n_hidden = 0  # tokens of the context that the window leaves out
        self._n_fresh_runs = 1  # runs of the last new tree
        self._is_hit = False

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return run_steps(self.propose_in_steps(context_ids, limits))

    def propose_in_steps(
        self, context_ids: Sequence[int], limits: TreeLimits
    ) -> DraftSteps[DraftTree]:
        self._limits, self._context = limits, context_ids
        view = self._view(context_ids)
        n_hidden = len(context_ids) - len(view)
        if n_hidden != self._n_hidden:
            self._tree, self._n_hidden = None, n_hidden  # the window has jumped
        depth = self._within_context(limits.max_depth, len(view))
        if not view or limits.max_nodes == 0 or depth < 1 or limits.min_level_probability > 1.0:
            # Even the root, whose path has the probability 1, does not pay for a run.
            return DraftTree(context_ids[-1])
        widths = []  # nodes of each run
        if self._tree is None or self._chain is not None:
            row = yield from self._advance(view)
            if row is None:
                return DraftTree(context_ids[-1])
            if self._chain is not None:
                length = min(limits.max_nodes, depth)
                chain = DrawnChain(context_ids, self._n_tokens, *self._chain)
                return (yield from self._draw_chain(context_ids, row, length, chain))
            self._start_tree(context_ids, row)
            widths.append(1)
        tree, is_grown = self._tree, not widths
        assert tree is not None, "it was started"
        frontier = Frontier(tree, depth, limits.width, limits.max_nodes)
        while level := self._best_level(tree, frontier):
            level = yield from self._run(tree, level, frontier)
            if not level:
                break
            widths.append(len(level))
        if not is_grown:
            self._n_fresh_runs = len(widths)
        proposal = tree.best_tree(limits.max_nodes, depth, limits.width)
        proposal.n_runs, proposal.n_run_nodes = len(widths), sum(widths)
        return proposal

    def prefill_in_steps(self, context_ids: Sequence[int], limit: int) -> DraftSteps[None]:
        view = self._window.view(context_ids)
        if not self._has_begun(view):
            return
        assert self._kv is not None, "it has begun"
        chunk = self._kv.cut_to(view)[:-1][:limit]  # the last one's logits are wanted later
        if chunk:
            self._prefix_cache.ensure_capacity(self._kv, len(chunk))
            yield SequenceInput(self._kv, chunk, logits_at=[])

    def num_uncomputed(self, context_ids: Sequence[int]) -> int:
        if self._kv is None or self._window.n_recent is not None:  # the window may jump next
            return len(self._window.view(context_ids))
        return len(context_ids) - self._kv.n_committed

    @property
    def can_draft_ahead(self) -> bool:
        """Whether there is a tree. Chains are drawn for the rejection rule, one per proposal:
        choosing between several drawn chains would bias that rule."""
        return self._tree is not None and self._chain is None

    def drafting_ahead(self, tree: DraftTree) -> DraftSteps[None]:
        """Run the likeliest outcomes of the pass that verifies `tree`, and nodes below them.

        An outcome is (the last accepted node, the target's token after it): a node outside of
        `tree` whose parent is in it.
        """
        grown = self._tree
        if grown is None:
            return
        grown.graft(tree)
        depth = self._within_context(self._limits.max_ahead_depth, self._sequence.n_committed)
        frontier = Frontier(grown, depth)
        for _ in range(_MAX_AHEAD * self._n_fresh_runs):
            level = self._level_ahead(grown, frontier)
            if not level:
                return
            for _, node in (yield from self._run(grown, level, frontier)):
                node.is_run_ahead = True

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        """Commit the KV of accepted nodes, whichever drafter proposed them."""
        self._is_hit = False
        if self._tree is None:
            return
        emitted = acceptance.emitted(tree)
        run = self._tree.follow(emitted[:-1] if self._chain is not None else emitted)
        path = [node.node_id for node in run if node.node_id is not None]
        if len(path) < len(emitted):
            self._sequence.commit(path)
            self._tree = None
            return
        self._is_hit = run[-1].is_run_ahead
        below = [node.node_id for node in run[-1].children.values() if node.node_id is not None]
        self._sequence.commit(path, keep=below)
        self._tree.move_to(run[-1])

    @property
    def is_ready(self) -> bool:
        """Whether the last step ended with a token that was run ahead."""
        return self._is_hit

    def reset(self) -> None:
        self._tree, self._is_hit = None, False
        kv, self._kv = self._kv, None
        if kv is not None and self._reuses_prefixes:
            self._prefix_cache.release(kv)
        elif kv is not None:
            self._prefix_cache.drop(kv)

    # --- trees ---------------------------------------------------------------------------------

    @property
    def _sequence(self) -> SequenceKV:
        assert self._kv is not None, "it begins with the first proposal"
        return self._kv

    def _start_tree(self, context_ids: Sequence[int], row: NDArray[np.float32]) -> None:
        (candidates,) = self._ranker.rank(
            row[None], [len(context_ids)], self._limits.width, [context_ids]
        )
        self._tree = self._new_tree(context_ids, candidates)

    def _new_tree(self, context_ids: Sequence[int], candidates: Candidates) -> GrownTree:
        """Return a tree below the last token, which `_advance` has run."""
        tree = GrownTree(context_ids[-1], len(context_ids) - 1, candidates)
        self._note_run([tree.root], self._root_output)
        return tree

    # --- what a draft head does otherwise -----------------------------------------------------

    _can_run_forced = True
    """Whether nodes may be run in one pass with their parents."""
    _reuses_prefixes = True
    """Whether the KV of other sequences with the same first tokens can be used."""

    def _view(self, context_ids: Sequence[int]) -> list[int]:
        """Return the tokens of the context that the draft's cache is to contain."""
        return self._window.view(context_ids)

    def _context_input(self, token_ids: Sequence[int]) -> SequenceInput:
        """Return the next tokens of the view as input of the draft."""
        return SequenceInput(self._sequence, token_ids)

    def _nodes_input(self, level: Level, parents: Sequence[int]) -> SequenceInput:
        return SequenceInput(self._sequence, [node.token_id for _, node in level], parents)

    def _note_run(self, nodes: Sequence[GrownNode], output: SequenceOutput) -> None:
        """Note the outputs of nodes that the draft has run."""

    # ------------------------------------------------------------------------------------------

    def _advance(self, view: Sequence[int]) -> DraftSteps[NDArray[np.float32] | None]:
        """Compute the view's tokens that the cache lacks; return the last one's logits [vocab]."""
        if not self._has_begun(view):
            return None
        assert self._kv is not None, "it has begun"
        chunk = self._kv.cut_to(view)
        self._prefix_cache.ensure_capacity(self._kv, len(chunk) + self._limits.max_nodes)
        scores = yield self._context_input(chunk)
        if scores is None:
            return None
        self._root_output = scores
        return scores.logits[0]

    def _has_begun(self, view: Sequence[int]) -> bool:
        """Begin the KV if needed; return False if other sequences leave no capacity for it."""
        if self._kv is None:
            try:
                reuses = self._reuses_prefixes
                self._kv = self._prefix_cache.allocate(view, skips_cache=not reuses)
                if reuses:
                    self._kv = self._prefix_cache.load_longer(self._kv, view)
            except BackendError:
                return False
        return True

    def _best_level(self, tree: GrownTree, frontier: Frontier) -> Level:
        """Return the nodes to run before the best nodes are known; empty when they are.

        These are the best nodes not run yet that may have children among the best.
        """
        limits = self._limits
        level = self._within_slots(frontier.take(level_width(limits.max_nodes)))
        known = set()
        if limits.known is not None:  # the draft runs forced tokens with the node before them
            known = tree.nodes_of(limits.known, left_out=GRAMMAR_SOURCE)
        new = [node for _, node in level if node not in known]
        probability = sum(np.exp(tree.log_prob(node)) for node in new)
        return level if probability >= limits.min_level_probability else []

    def _level_ahead(self, tree: GrownTree, frontier: Frontier) -> Level:
        """Return the likeliest nodes that were not run, within the free slots."""
        # Slots that the next proposal needs stay free.
        n_nodes = self._limits.max_nodes
        return self._within_slots(frontier.take(level_width(n_nodes), _MIN_SHARE), n_nodes)

    def _within_slots(self, level: Level, n_reserved: int = 0) -> Level:
        """Return the nodes of a level that the cache can hold beside `n_reserved` more, once cached
        KV of other sequences is evicted as far as needed."""
        if level:
            self._prefix_cache.ensure_capacity(self._sequence, len(level) + n_reserved)
        return level[: max(0, self._sequence.num_free_slots - n_reserved)]

    def _run(self, tree: GrownTree, level: Level, frontier: Frontier) -> DraftSteps[Level]:
        """Run nodes whose parents were run, with forced tokens below them; set their candidates.

        Return the nodes run, parents first; none if the KV cache has no capacity.
        """
        grammar, prefixes, n_chosen = self._ranker.grammar, [], len(level)
        kv = self._sequence
        if grammar is not None:
            for parent, node in level:
                node.above = parent
            if self._can_run_forced:
                level = with_forced(
                    level,
                    grammar,
                    self._context,
                    n_tokens=self._n_tokens,
                    max_count=min(level_width(self._limits.max_nodes), kv.num_free_slots),
                    deepest=frontier.deepest,
                )
            prefixes = [[*self._context, *node.tokens_below_root()] for _, node in level]
        ids = {id(node): kv.next_node_id + i for i, (_, node) in enumerate(level)}
        parents = [
            ids[id(parent)] if parent.node_id is None else parent.node_id for parent, _ in level
        ]
        scores = yield self._nodes_input(level, parents)
        if scores is None:
            return []
        self._note_run([node for _, node in level], scores)
        places = [node.position + 1 for _, node in level]
        ranked = self._ranker.rank(scores.logits, places, self._limits.width, prefixes)
        for (_, node), candidates in zip(level, ranked, strict=True):
            tree.run(node, ids[id(node)], candidates)
        for _, node in level[:n_chosen]:
            frontier.add(node)
        return level

    def _within_context(self, depth: int, n_committed: int) -> int:
        """Return the levels of a tree that fit in the context; the last level is not run."""
        return min(depth, self._backend.max_context - n_committed + 1)

    # --- chains --------------------------------------------------------------------------------

    def _draw_chain(
        self, context_ids: Sequence[int], row: NDArray[np.float32], length: int, chain: DrawnChain
    ) -> DraftSteps[DraftTree]:
        """Draw tokens one by one, and run each for the next one's logits."""
        tree = chain.tree
        self._tree = self._new_tree(context_ids, [])
        node = self._tree.root
        while chain.draw(row) and tree.n_drafted < length:
            parent, node = node, node.child(tree.token_ids[-1], tree.log_probs[-1])
            scores = yield self._nodes_input([(parent, node)], [_live_id(parent)])
            if scores is None:
                break  # no capacity: independent of the tokens, so without bias
            self._note_run([node], scores)
            (row,) = scores.logits
            self._tree.run(node, scores.node_ids[0], [])
        tree.n_runs = tree.n_run_nodes = tree.n_drafted
        return tree


def _live_id(node: GrownNode) -> int:
    assert node.node_id is not None, "a node is run after its parent"
    return node.node_id
