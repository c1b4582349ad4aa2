"""Exact distributions of acceptance rules, by enumerating every random decision in float64.

A rule asks for its decisions through `specdec.verification.acceptance.Decisions`.
`enumerate_outcomes` answers them in every possible way and weighs each run with its probability, so
that what a rule emits can be compared with the target to rounding error instead of statistically.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.verification.acceptance import Acceptance, verify_match
from specdec.verification.tree import DraftTree

Rows = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> distribution [vocab]
Rule = Callable[..., Acceptance]


class ScriptedDecisions:
    """Answer the first decisions as scripted, the others with their first possible outcome."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script
        self.taken: list[int] = []
        self.weight = 1.0
        self.open: list[tuple[int, list[int]]] = []  # (decision index, its other outcomes)

    def _decide(self, probs: np.ndarray) -> int:
        index = len(self.taken)
        possible = [int(i) for i in np.flatnonzero(probs)]
        if index < len(self._script):
            outcome = self._script[index]
        else:
            outcome = possible[0]
            self.open.append((index, possible[1:]))
        self.taken.append(outcome)
        self.weight *= float(probs[outcome])
        return outcome

    def bernoulli(self, probability: float) -> bool:
        return self._decide(np.array([1.0 - probability, probability])) == 1

    def categorical(self, probs: np.ndarray) -> int:
        return self._decide(probs)


def enumerate_outcomes(run: Callable[[ScriptedDecisions], Any]) -> Iterator[tuple[Any, float]]:
    """Yield every outcome of `run` with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        decisions = ScriptedDecisions(scripts.pop())
        result = run(decisions)
        yield result, decisions.weight
        for index, rest in decisions.open:
            scripts.extend((*decisions.taken[:index], other) for other in rest)


@dataclass
class Case:
    """A target and a draft over all prefixes of a small vocabulary."""

    vocab: int
    depth: int
    target: Rows
    draft: Rows


def table_rows(vocab: int, seed: int, *, concentration: float = 0.7, zeros: float = 0.0) -> Rows:
    """Return random distributions, another one for every prefix."""
    cache: dict[tuple[int, ...], np.ndarray] = {}

    def rows(prefix: tuple[int, ...]) -> np.ndarray:
        if prefix not in cache:
            rng = np.random.default_rng([seed, len(prefix), *prefix])
            row = rng.dirichlet(np.full(vocab, concentration)) + 1e-9
            dropped = rng.random(vocab) < zeros
            dropped[rng.integers(vocab)] = False
            row[dropped] = 0.0
            cache[prefix] = row / row.sum()
        return cache[prefix]

    return rows


def top_p_rows(rows: Rows, mass: float) -> Rows:
    """Return the smallest most probable sets of at least this mass, renormalised."""

    def filtered(prefix: tuple[int, ...]) -> np.ndarray:
        p = rows(prefix)
        order = np.argsort(-p)
        num_retained = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
        cached = np.zeros_like(p)
        cached[order[:num_retained]] = p[order[:num_retained]]
        return cached / cached.sum()

    return filtered


def match_rule(
    tree: DraftTree,
    target_probs: Callable[[int], np.ndarray],
    decisions: Any,
    walk: Rule = verify_match,
    **options: Any,
) -> Acceptance:
    """Run verify_match with its choices enumerated: the target's token is y with p(y)."""
    return walk(tree, lambda node: decisions.categorical(target_probs(node)), **options)


def make_case(vocab: int, depth: int, seed: int, kind: str) -> Case:
    target = table_rows(vocab, seed)
    draft = table_rows(vocab, seed + 1000)
    if kind == "same":
        draft = target
    elif kind == "zeros":
        target = table_rows(vocab, seed, zeros=0.5)
        draft = table_rows(vocab, seed + 1000, zeros=0.5)
    elif kind == "top_p both":
        target, draft = top_p_rows(target, 0.7), top_p_rows(draft, 0.8)
    elif kind == "nearly same":
        near = target
        draft = lambda prefix: _shifted(near(prefix))  # noqa: E731
    elif kind == "disjoint":
        target = lambda prefix: _half(vocab, 0)  # noqa: E731
        draft = lambda prefix: _half(vocab, 1)  # noqa: E731
    return Case(vocab, depth, target, draft)


def _shifted(row: np.ndarray) -> np.ndarray:
    other = row * (1.0 + 1e-15 * np.arange(len(row)))
    return other / other.sum()


def _half(vocab: int, start: int) -> np.ndarray:
    row = np.zeros(vocab)
    row[start::2] = 1.0
    return row / row.sum()


KINDS = ["random", "same", "nearly same", "zeros", "top_p both", "disjoint"]


def chain_of(tokens: tuple[int, ...], draft: Rows | None) -> DraftTree:
    """Return a chain below root token 0 with the draft's rows; None = deterministic tokens."""
    tree = DraftTree(0)
    node = 0
    for i, token in enumerate(tokens):
        row = None if draft is None else draft(tokens[:i])
        node = tree.add(node, token, 0.0 if row is None else np.log(row[token]), "draft", row)
    return tree


def target_joint(rows: Rows, vocab: int, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Return the probabilities of all continuations of a prefix, shape (vocab,) * length."""
    joint = np.ones(())
    if length == 0:
        return joint
    row = rows(prefix)
    parts = [
        row[t] * target_joint(rows, vocab, length - 1, (*prefix, t))
        if row[t]
        else np.zeros((vocab,) * (length - 1))
        for t in range(vocab)
    ]
    return np.stack(parts)


def completed_joint(emitted: dict[tuple[int, ...], float], case: Case) -> np.ndarray:
    """Return emitted token sequences, each continued by the target to depth + 1 tokens."""
    length = case.depth + 1
    joint = np.zeros((case.vocab,) * length)
    for tokens, mass in emitted.items():
        joint[tokens] += mass * target_joint(case.target, case.vocab, length - len(tokens), tokens)
    return joint


def drawn_chains(
    case: Case,
    ends: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
    tokens: tuple[int, ...] = (),
    chance: float = 1.0,
) -> Iterator[tuple[DraftTree, float]]:
    """Yield every chain that the draft may draw, with its probability.

    It has `case.depth` tokens, fewer where the drafter gives up: where `ends` of the tokens so far.
    """
    if len(tokens) == case.depth or ends(tokens):
        yield chain_of(tokens, case.draft), chance
        return
    row = case.draft(tokens)
    for token in np.flatnonzero(row):
        more = (*tokens, int(token))
        yield from drawn_chains(case, ends, more, chance * float(row[token]))


def chain_error(
    rule: Rule,
    case: Case,
    ends: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
    **options: Any,
) -> float:
    """Return the largest error of a rule for sampled chains, over all depth + 1 tokens."""
    emitted: dict[tuple[int, ...], float] = {}
    for tree, chance in drawn_chains(case, ends):
        _run_rule(rule, tree, case, chance, emitted, options)
    return _error(emitted, case)


def expected_accepted(rule: Rule, case: Case) -> float:
    """Return E[accepted tokens] of a step of a rule for sampled chains."""
    return sum(
        chance * weight * outcome.n_accepted
        for tree, chance in drawn_chains(case)
        for outcome, weight in outcomes(rule, tree, case)
    )


def fixed_tree_error(rule: Rule, tree: DraftTree, case: Case, **options: Any) -> float:
    """Return the largest error of a rule for one given tree."""
    emitted: dict[tuple[int, ...], float] = {}
    _run_rule(rule, tree, case, 1.0, emitted, options)
    return _error(emitted, case)


def outcomes(
    rule: Rule, tree: DraftTree, case: Case, **options: Any
) -> Iterator[tuple[Acceptance, float]]:
    """Return every outcome of a rule for a tree, with its probability."""

    def target_probs(node: int) -> np.ndarray:
        return case.target(tree.tokens_on_path(node))

    return enumerate_outcomes(lambda decisions: rule(tree, target_probs, decisions, **options))


def _run_rule(
    rule: Rule,
    tree: DraftTree,
    case: Case,
    chance: float,
    emitted: dict[tuple[int, ...], float],
    options: dict[str, Any],
) -> None:
    for outcome, weight in outcomes(rule, tree, case, **options):
        tokens = outcome.emitted(tree)
        emitted[tokens] = emitted.get(tokens, 0.0) + chance * weight


def _error(emitted: dict[tuple[int, ...], float], case: Case) -> float:
    difference = completed_joint(emitted, case) - target_joint(
        case.target, case.vocab, case.depth + 1
    )
    return float(np.abs(difference).max())
