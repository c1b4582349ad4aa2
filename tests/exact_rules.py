"""Exact distributions of acceptance rules, by enumerating every random decision in float64.

A rule asks for its decisions through `specdec.acceptance.Decisions`. `enumerate_outcomes` answers
them in every possible way and weighs each run with its probability, so that what a rule emits can
be compared with the target to rounding error instead of statistically.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.acceptance import Acceptance
from specdec.tree import DraftTree

Rows = Callable[[tuple[int, ...]], np.ndarray]  # prefix -> distribution [vocab]
Rule = Callable[..., Acceptance]


class ScriptedDecisions:
    """Answers the first decisions as scripted, the others with their first possible outcome."""

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
    """Every outcome of `run` with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        decisions = ScriptedDecisions(scripts.pop())
        result = run(decisions)
        yield result, decisions.weight
        for index, others in decisions.open:
            scripts.extend((*decisions.taken[:index], other) for other in others)


@dataclass
class Case:
    """A target and a draft over all prefixes of a small vocabulary.

    raw_target is the target before its processors, for rules that forget to apply them.
    """

    vocab: int
    depth: int
    target: Rows
    draft: Rows
    raw_target: Rows


def table_rows(vocab: int, seed: int, *, concentration: float = 0.7, zeros: float = 0.0) -> Rows:
    """Random distributions, another one for every prefix."""
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
    """The smallest most probable sets of at least this mass, renormalised."""

    def filtered(prefix: tuple[int, ...]) -> np.ndarray:
        p = rows(prefix)
        order = np.argsort(-p)
        n_kept = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
        kept = np.zeros_like(p)
        kept[order[:n_kept]] = p[order[:n_kept]]
        return kept / kept.sum()

    return filtered


def chain_of(tokens: tuple[int, ...], draft: Rows | None) -> DraftTree:
    """A chain below root token 0 whose rows are the draft's; None = deterministic tokens."""
    tree = DraftTree(0)
    node = 0
    for i, token in enumerate(tokens):
        row = None if draft is None else draft(tokens[:i])
        node = tree.add(node, token, 0.0 if row is None else np.log(row[token]), "draft", row)
    return tree


def target_joint(rows: Rows, vocab: int, length: int, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Probabilities of all continuations of a prefix, shape (vocab,) * length."""
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
    """Emitted token sequences, each continued by the target to depth + 1 tokens."""
    length = case.depth + 1
    joint = np.zeros((case.vocab,) * length)
    for tokens, mass in emitted.items():
        joint[tokens] += mass * target_joint(case.target, case.vocab, length - len(tokens), tokens)
    return joint


def rejection_error(rule: Rule, case: Case, **options: Any) -> float:
    """Largest error of a rule for sampled chains, over all sequences of depth + 1 tokens."""
    emitted: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(case.vocab), repeat=case.depth):
        chance = 1.0
        for i, token in enumerate(tokens):
            chance *= float(case.draft(tokens[:i])[token])
        if chance > 0.0:
            tree = chain_of(tokens, case.draft)
            _run_rule(rule, tree, case, chance, emitted, options)
    return _error(emitted, case)


def fixed_tree_error(rule: Rule, tree: DraftTree, case: Case, **options: Any) -> float:
    """Largest error of a rule for one given tree."""
    emitted: dict[tuple[int, ...], float] = {}
    _run_rule(rule, tree, case, 1.0, emitted, options)
    return _error(emitted, case)


def _run_rule(
    rule: Rule,
    tree: DraftTree,
    case: Case,
    chance: float,
    emitted: dict[tuple[int, ...], float],
    options: dict[str, Any],
) -> None:
    def target_probs(node: int) -> np.ndarray:
        return case.target(tree.tokens_on_path(node))

    def raw_probs(node: int) -> np.ndarray:
        return case.raw_target(tree.tokens_on_path(node))

    target_probs.raw = raw_probs  # type: ignore[attr-defined]
    for outcome, weight in enumerate_outcomes(
        lambda decisions: rule(tree, target_probs, decisions, **options)
    ):
        tokens = outcome.emitted(tree)
        emitted[tokens] = emitted.get(tokens, 0.0) + chance * weight


def _error(emitted: dict[tuple[int, ...], float], case: Case) -> float:
    difference = completed_joint(emitted, case) - target_joint(
        case.target, case.vocab, case.depth + 1
    )
    return float(np.abs(difference).max())
