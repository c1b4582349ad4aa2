"""Block verification of a sampled chain (Sun et al. 2024, "Block Verification Accelerates
Speculative Decoding", algorithm 2): never fewer accepted tokens in expectation than rejection.

Rejection decides token by token and ends at the first rejected token. Here the block is verified as
a whole: a token that is likelier under the target than under the draft makes up for an earlier one
that is less likely, and the *longest* prefix that passes its own test is accepted.

For a chain x of γ tokens, p and q the rows of target and draft:

    p₀ = 1,  pᵢ = min(pᵢ₋₁ · p(xᵢ) / q(xᵢ), 1)          covered share of the path's mass
    Rᵢ = Σₓ (pᵢ · p(x | x≤i) − q(x | x≤i))₊              mass not covered by the draft after i
    hᵢ = Rᵢ / (Rᵢ + 1 − pᵢ) for i < γ, 1 where that is 0/0;  h_γ = p_γ
    τ = max {i : uᵢ ≤ hᵢ}, uᵢ independent uniforms, h₀ = 1
    next token ∼ norm((p_τ · p − q)₊) for τ < γ, else ∼ p

Cut blocks. The paper's blocks have a fixed length. A chain ends earlier where the drafter stops, at
a stop token, or where no further token is wanted; each of these is known from the tokens up to
there. Imagine such a chain continued with tokens drawn from the target itself: with q = p from the
cut c on, pᵢ = p_c, hence Rᵢ = (p_c − 1)₊ = 0 and hᵢ = 0 for c ≤ i < γ (1 if p_c = 1), and
h_γ = p_c. The whole block is then accepted with probability p_c and its end is the target's own, or
τ < c is decided by the same hᵢ as before. That is the rule applied to the cut chain with h_c = p_c,
so every such cut is exact, and tokens after it need no logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.verification.acceptance import (
    Acceptance,
    Decisions,
    Probs,
    as_decisions,
    check_chain,
    check_limit,
    draft_row,
    is_last,
    likelihood_ratio,
    residual,
)
from specdec.verification.tree import ROOT, DraftTree


class _Block(NamedTuple):
    """The verified part of a chain: γ = len(nodes) - 1."""

    nodes: list[int]  # root first
    weights: list[float]  # p₀ .. p_γ, one for each node
    rows: list[tuple[Probs, Probs]]  # (p, q) after each node but the last
    ends_text: bool  # the last token is a stop token, or the last one wanted


def verify_block(
    tree: DraftTree,
    target_probs: Callable[[int], Probs],
    rng: np.random.Generator | Decisions,
    max_tokens: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> Acceptance:
    """Accept the longest prefix of a sampled chain that passes its test (see the module docstring).

    Args:
        tree: a chain; node i's token was drawn from `tree.draft_probs[i]`. A node without such a
            row was chosen deterministically: its q is one-hot.
        target_probs: node index -> p, the target's distribution after that node; called along the
            chain until no later token can be accepted.
        rng: source of the decisions.
        max_tokens, stop_tokens: as in `verify_match`.
    Raises:
        ValueError: the tree branches.
    """
    check_limit(max_tokens)
    check_chain(tree, "verify_block")
    decisions = as_decisions(rng)
    block = _judge(tree, target_probs, max_tokens, stop_tokens)
    n_accepted = _longest_accepted(block, decisions)
    path = tuple(block.nodes[: n_accepted + 1])
    if n_accepted < len(block.rows):
        p, q = block.rows[n_accepted]
        recovered = decisions.categorical(residual(p, q, block.weights[n_accepted]))
        return Acceptance(path, recovered, is_bonus=False)
    if block.ends_text:
        return Acceptance(path[:-1], tree.token_ids[path[-1]], is_bonus=False)
    return Acceptance(path, decisions.categorical(target_probs(path[-1])), is_bonus=True)


def _judge(
    tree: DraftTree,
    target_probs: Callable[[int], Probs],
    max_tokens: int | None,
    stop_tokens: frozenset[int],
) -> _Block:
    """Return the chain up to its end, a cut, or a weight of 0, after which all weights are 0."""
    block = _Block([ROOT], [1.0], [], ends_text=False)
    while not block.ends_text and block.weights[-1] > 0.0:
        node = block.nodes[-1]
        child = next(iter(tree.children(node).values()), None)
        if child is None:
            break
        p = target_probs(node)
        q = draft_row(tree, child, len(p))
        token = tree.token_ids[child]
        block.rows.append((p, q))
        block.nodes.append(child)
        block.weights.append(min(block.weights[-1] * likelihood_ratio(p, q, token), 1.0))
        ends_text = is_last(token, len(block.rows), max_tokens, stop_tokens)
        block = block._replace(ends_text=ends_text)
    return block


def _longest_accepted(block: _Block, decisions: Decisions) -> int:
    """Return τ, decided from the end: only the last success counts."""
    for i in range(len(block.rows), 0, -1):
        is_end = i == len(block.rows)
        weight = block.weights[i]
        if decisions.bernoulli(weight if is_end else _pass_probability(weight, *block.rows[i])):
            return i
    return 0


def _pass_probability(weight: float, p: Probs, q: Probs) -> float:
    """Return hᵢ of a token inside the block."""
    uncovered = float(np.maximum(weight * p - q, 0.0).sum())
    whole = uncovered + (1.0 - weight)
    return uncovered / whole if whole > 0.0 else 1.0
