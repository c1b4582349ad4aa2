"""ModelDrafter: a small model grows a tree of its likeliest continuations.

Level by level, the draft expands the most promising nodes of the newest level, as in SpecExec
(Svirschevski et al. 2024, section 4) and EAGLE-2 (Li et al. 2024, section 4): a node is worth the
product of the draft probabilities on its path, the estimate of being accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.base import PREFIX, Backend
from specdec.acceptance import Acceptance, sample_index
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.window import DraftWindow
from specdec.sampling import Sampler
from specdec.tree import ROOT, DraftTree

MAX_BEAMS = 32
"""Nodes of one level that the draft expands; more make a level slow and add little."""


class ModelDrafter(Drafter):
    """Drafts with its own model and its own KV cache.

    The draft's cache holds the context, or a window of it, up to and including the pending token.
    After a round the accepted nodes that the draft had expanded are committed in place; only what
    it had not run yet (the last accepted leaf, the recovered or bonus token) is computed next time.

    Args:
        backend: the draft model; it outlives the drafter.
        n_tokens: tokens that exist for the target; the draft's further ids are never proposed.
        chain: (sampler, rng) to *draw* chains with, for the rejection rule; without it, trees of
            the likeliest tokens are built, for the match walk.
        temperature: of the distribution that ranks candidates.
        window: what the draft's cache holds of the context.
    """

    def __init__(
        self,
        backend: Backend,
        n_tokens: int,
        *,
        chain: tuple[Sampler, np.random.Generator] | None = None,
        temperature: float = 1.0,
        window: DraftWindow = DraftWindow(),  # noqa: B008 (immutable)
    ) -> None:
        self._backend = backend
        self._window = window
        self._n_tokens = min(n_tokens, backend.vocab_size)
        self._chain = chain
        self._temperature = temperature
        self._node_ids: dict[tuple[int, int], int] = {}  # (parent's id, token) -> backend's id

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree = DraftTree(context_ids[-1])
        self._node_ids = {}
        view = self._window.view(context_ids)
        depth = min(limits.max_depth, self._backend.max_context - len(view) + 1)
        if limits.max_nodes == 0 or depth < 1:
            return tree
        limits = TreeLimits(limits.max_nodes, depth, limits.width)
        row = self._advance(view)
        if self._chain is not None:
            self._draw_chain(tree, row, context_ids, limits, *self._chain)
            return tree
        self._grow(tree, row, limits)
        return tree.best_subset(limits.max_nodes)

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        """Keep the KV of accepted nodes, whichever drafter's tree they came from."""
        path, node = [], PREFIX
        for token in acceptance.emitted(tree)[:-1]:
            expanded = self._node_ids.get((node, token))
            if expanded is None:
                break
            path.append(expanded)
            node = expanded
        self._backend.commit(path)
        self._node_ids = {}

    def reset(self) -> None:
        self._backend.rollback(0)
        self._node_ids = {}

    def _advance(self, view: Sequence[int]) -> NDArray[np.float32]:
        """Run what the cache lacks of the view; logits after the pending token [vocab]."""
        _, row = self._backend.prefill_from(view)
        return row

    # --- trees ---------------------------------------------------------------------------------

    def _grow(self, tree: DraftTree, row: NDArray[np.float32], limits: TreeLimits) -> None:
        """Add candidates level by level until no node of the newest level is worth its run."""
        level, rows = [ROOT], row[None]
        ids = {ROOT: PREFIX}
        for depth in range(1, limits.max_depth + 1):
            newest = self._branch(tree, level, rows, limits)
            level = self._worth_expanding(tree, newest, limits)[: self._n_runnable()]
            if not level or depth == limits.max_depth:
                return
            node_ids, rows = self._run(tree, level, [ids[tree.parents[i]] for i in level])
            ids = dict(zip(level, node_ids, strict=True))

    def _branch(
        self, tree: DraftTree, level: list[int], rows: NDArray[np.float32], limits: TreeLimits
    ) -> list[int]:
        """Add each node's likeliest children that could still be among the best nodes."""
        scores = rows[:, : self._n_tokens] / np.float32(self._temperature)
        width = min(limits.width, scores.shape[1])
        top = np.argpartition(scores, -width, axis=1)[:, -width:]
        peak = scores.max(axis=1, keepdims=True)
        log_z = peak[:, 0] + np.log(np.exp(scores - peak).sum(axis=1, dtype=np.float64))
        worst = _nth_best(tree, limits.max_nodes)
        newest = []
        for node, tokens, row, norm in zip(level, top, scores, log_z, strict=True):
            for token in tokens:
                log_q = float(row[token] - norm)
                if tree.path_log_probs[node] + log_q > worst:
                    newest.append(tree.add(node, int(token), log_q))
        return newest

    @staticmethod
    def _worth_expanding(tree: DraftTree, newest: list[int], limits: TreeLimits) -> list[int]:
        worst = _nth_best(tree, limits.max_nodes)
        ranked = sorted(newest, key=lambda i: -tree.path_log_probs[i])[:MAX_BEAMS]
        return [i for i in ranked if tree.path_log_probs[i] > worst]

    def _n_runnable(self) -> int:
        """Nodes that the backend can take beside those that this tree has run."""
        return max(0, self._backend.node_room - len(self._node_ids))

    def _run(
        self, tree: DraftTree, nodes: list[int], parents: list[int]
    ) -> tuple[list[int], NDArray[np.float32]]:
        tokens = [tree.token_ids[i] for i in nodes]
        ids, rows = self._backend.extend(tokens, parents)
        self._node_ids.update(zip(zip(parents, tokens, strict=True), ids, strict=True))
        return ids, rows

    # --- chains --------------------------------------------------------------------------------

    def _draw_chain(
        self,
        tree: DraftTree,
        row: NDArray[np.float32],
        context_ids: Sequence[int],
        limits: TreeLimits,
        sampler: Sampler,
        rng: np.random.Generator,
    ) -> None:
        """Draw token after token from q, the draft's distribution after its own processors."""
        node, parent, prefix = ROOT, PREFIX, list(context_ids)
        for _ in range(min(limits.max_nodes, limits.max_depth)):
            q = sampler.probs(prefix, row[: self._n_tokens])
            token = sample_index(q, rng.random())
            node = tree.add(node, token, float(np.log(q[token])), draft_probs=q)
            prefix.append(token)
            if tree.n_drafted < min(limits.max_nodes, limits.max_depth):
                (parent,), rows = self._run(tree, [node], [parent])
                row = rows[0]


def _nth_best(tree: DraftTree, n: int) -> float:
    """Path log-probability that a node must exceed to be among the best n of the tree."""
    if tree.n_drafted < n:
        return -np.inf
    return float(np.partition(tree.path_log_probs[1:], tree.n_drafted - n)[tree.n_drafted - n])
