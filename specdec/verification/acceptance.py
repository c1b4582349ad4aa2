"""Acceptance rules for draft tokens: pure functions of (tree, target, noise).

Words, as in vLLM: *accepted* tokens are draft tokens that stay; a *recovered* token replaces the
first one that does not; a *bonus* token follows when there was nothing left to reject. Every step
emits the accepted tokens and exactly one recovered or bonus token, which becomes the next root.

`verify_match` chooses the target's token first and then looks it up in the tree. Since the draft
has no part in the choice, any tree is lossless. `verify_rejection` (Leviathan et al. 2023, Chen et
al. 2023) verifies one chain whose tokens were drawn from known distributions q, token by token;
`specdec.verification.block` verifies such a chain as a whole. `lenient` is the only rule that is
not lossless, and only used where a caller asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.verification.tree import ROOT, DraftTree

Probs = NDArray[np.float64]  # [vocab], sums to 1


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one step.

    path: accepted nodes in tree indices, root first; always contains 0.
    next_token: the token emitted after them, not yet in the KV cache: the next root.
    is_bonus: the walk ended at a leaf, so next_token had no draft token to compare with.
    """

    path: tuple[int, ...]
    next_token: int
    is_bonus: bool

    @property
    def n_accepted(self) -> int:
        return len(self.path) - 1

    def emitted(self, tree: DraftTree) -> tuple[int, ...]:
        """Return the step's new tokens in order: accepted ones, then next_token."""
        return (*(tree.token_ids[i] for i in self.path[1:]), self.next_token)


class Decisions(Protocol):
    """The two random decisions of the chain rules; tests enumerate them instead of drawing."""

    def bernoulli(self, probability: float) -> bool: ...

    def categorical(self, probs: Probs) -> int: ...


class RandomDecisions:
    """Decisions drawn from a numpy generator; every decision uses a fresh uniform."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def bernoulli(self, probability: float) -> bool:
        return self._rng.random() < probability

    def categorical(self, probs: Probs) -> int:
        return sample_index(probs, self._rng.random())


def verify_match(
    tree: DraftTree,
    choose: Callable[[int], int],
    max_tokens: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> Acceptance:
    """Follow the target's own tokens down the tree, and emit the first one that is not in it.

    Args:
        tree: any tree that was built independently of the target's choices.
        choose: node index -> the target's token after that node; called once per emitted token,
            from the root downwards, so that only nodes on the path pay for the logits pipeline.
        max_tokens: maximum tokens emitted (≥ 1; None = no limit).
        stop_tokens: a token of this set is emitted and ends the step, even if it was drafted.
    """
    check_limit(max_tokens)
    path = [ROOT]
    while True:
        node = path[-1]
        token = int(choose(node))
        child = tree.children(node).get(token)
        if child is None or is_last(token, len(path), max_tokens, stop_tokens):
            return Acceptance(tuple(path), token, is_bonus=not tree.children(node))
        path.append(child)


def lenient(
    tree: DraftTree,
    choose: Callable[[int], int],
    target_probs: Callable[[int], Probs],
    threshold: float,
) -> Callable[[int], int]:
    """Return a lossy `choose` for `verify_match` that accepts draft tokens that are likely enough.

    If the target's own token was drafted, it is taken. If not, the drafted token with the largest
    target probability takes its place if that is at least `threshold`: the output is then not the
    target's own. At a threshold of 1 only a certain token qualifies, and the rule is lossless.

    Args:
        tree: the draft tokens.
        choose: node index -> the target's token after that node.
        target_probs: node index -> the target's processed distribution after that node; called
            only where the target's token was not drafted.
        threshold: in (0, 1]; a token of probability 0, such as a banned one, is never taken.
    """

    def choose_leniently(node: int) -> int:
        token, drafted = int(choose(node)), tree.children(node)
        if not drafted or token in drafted:
            return token
        p = target_probs(node)
        candidates = [candidate for candidate in drafted if candidate < len(p)]
        best = max(candidates, key=lambda candidate: float(p[candidate]), default=token)
        return best if p[best] >= threshold else token

    return choose_leniently


def verify_rejection(
    tree: DraftTree,
    target_probs: Callable[[int], Probs],
    rng: np.random.Generator | Decisions,
    max_tokens: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> Acceptance:
    """Accept a sampled chain token by token with min(1, p/q); replace the first rejected one.

    Args:
        tree: a chain; node i's token was drawn from `tree.draft_probs[i]`. A node without such a
            row was chosen deterministically: its q is one-hot.
        target_probs: node index -> p, the target's distribution after that node.
        rng: source of the decisions.
        max_tokens, stop_tokens: as in `verify_match`.
    Raises:
        ValueError: the tree branches.
    """
    check_limit(max_tokens)
    check_chain(tree, "verify_rejection")
    decisions = as_decisions(rng)
    path = [ROOT]
    while True:
        p = target_probs(path[-1])
        child = next(iter(tree.children(path[-1]).values()), None)
        if child is None:
            return Acceptance(tuple(path), decisions.categorical(p), is_bonus=True)
        token = tree.token_ids[child]
        q = draft_row(tree, child, len(p))
        if not decisions.bernoulli(accept_probability(p, q, token)):
            recovered = decisions.categorical(residual(p, q))
            return Acceptance(tuple(path), recovered, is_bonus=False)
        if is_last(token, len(path), max_tokens, stop_tokens):
            return Acceptance(tuple(path), token, is_bonus=False)
        path.append(child)


def accept_probability(p: Probs, q: Probs, token: int) -> float:
    """Return min(1, p(token) / q(token)); 0 for a token outside p or outside its vocabulary."""
    return min(1.0, likelihood_ratio(p, q, token))


def likelihood_ratio(p: Probs, q: Probs, token: int) -> float:
    """Return p(token) / q(token), infinite for p / 0; 0 for a token outside p or its vocabulary."""
    if token >= len(p) or p[token] <= 0.0:
        return 0.0
    return float(p[token] / q[token]) if q[token] > 0.0 else float("inf")


def residual(p: Probs, q: Probs, weight: float = 1.0) -> Probs:
    """Return norm((weight · p − q)₊), the distribution of the recovered token.

    If p ≈ q the sum is 0 or rounding noise; a rejection is then about as improbable, and p itself
    is returned instead of dividing by zero.
    """
    uncovered = np.maximum(weight * p - q, 0.0)
    total = float(uncovered.sum())
    return uncovered / total if total > np.finfo(np.float64).eps else p


def sample_index(probs: Probs, uniform: float) -> int:
    """Return the index that a uniform number in [0, 1) selects; never one of probability 0."""
    cumulative = np.cumsum(probs)
    # At most 1 - 2**-53, so that its product with the total is below the total in any rounding.
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


def draft_row(tree: DraftTree, node: int, n: int) -> Probs:
    """Return q of a node as float64 [n], padded or cut to the target's vocabulary."""
    row = tree.draft_probs[node]
    q = np.zeros(n, dtype=np.float64)
    if row is None:
        if tree.token_ids[node] < n:
            q[tree.token_ids[node]] = 1.0
        return q
    shared = min(n, len(row))
    q[:shared] = row[:shared]
    return q


def is_last(token: int, n_emitted: int, max_tokens: int | None, stops: frozenset[int]) -> bool:
    """Return whether the step's n-th token ends it: a stop token, or the last one wanted."""
    return token in stops or (max_tokens is not None and n_emitted >= max_tokens)


def check_limit(max_tokens: int | None) -> None:
    """Raise ValueError unless a step may emit at least one token."""
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, a step always emits at least one token")


def check_chain(tree: DraftTree, rule: str) -> None:
    """Raise ValueError for a tree that branches."""
    if not tree.is_chain:
        raise ValueError(f"{rule} verifies a chain, but the tree branches")


def as_decisions(rng: np.random.Generator | Decisions) -> Decisions:
    """Return the decisions of a generator, or a test's decisions unchanged."""
    return RandomDecisions(rng) if isinstance(rng, np.random.Generator) else rng
