"""Mistakes in the source of the acceptance rules and of the sampler: exact tests catch every one.

A test that no wrong rule can fail proves nothing. Here the modules themselves are changed in one
place, with the bugs that others shipped and those that are easily made, and the enumerations of
test_acceptance_exact.py and test_block_verification.py, the definitions of test_accept_threshold.py
and a sampler written down from its definition must fail.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from exact_rules import (
    Case,
    chain_error,
    chain_of,
    fixed_tree_error,
    make_case,
    match_rule,
    outcomes,
    table_rows,
    top_p_rows,
)
from mutants import mutated

from specdec import acceptance, block_verification, sampling
from specdec.config import SamplingParams
from specdec.tree import DraftTree

CAUGHT = 1e-6  # far above rounding, far below the error of any mutant here
CASES = (
    Case(4, 3, top_p_rows(table_rows(4, seed=31), 0.85), table_rows(4, seed=77)),
    make_case(4, 2, seed=5, kind="zeros"),
    make_case(3, 2, seed=6, kind="same"),
)
STOPS = frozenset({1})


# --- the checks -----------------------------------------------------------------------------


def chain_is_exact(walk: Callable[..., Any]) -> bool:
    """The distribution of what is emitted, also where a text or a chain ends early."""
    errors = [chain_error(walk, case) for case in CASES]
    errors.append(chain_error(walk, CASES[0], lambda tokens: tokens[-1:] == (2,)))
    errors.append(chain_error(walk, CASES[0], max_tokens=2, stop_tokens=STOPS))
    return max(errors) <= CAUGHT and _chain_outcomes_are_right(walk)


def _chain_outcomes_are_right(walk: Callable[..., Any]) -> bool:
    """Nothing follows the end of a text; a token outside the vocabulary is refused; names."""
    row = np.array([0.25, 0.75])
    same = Case(2, 3, lambda prefix: row, lambda prefix: row)  # all is accepted
    tree = chain_of((0, 1, 0), same.draft)
    for limit, stops, n_emitted in (
        *((limit, frozenset(), min(limit, 4)) for limit in (1, 2, 3, 4, 5)),
        (4, STOPS, 2),
        (1, STOPS, 1),
    ):
        for one, _ in outcomes(walk, tree, same, max_tokens=limit, stop_tokens=stops):
            emitted, is_whole = one.emitted(tree), n_emitted == 4
            if emitted[:3] != (0, 1, 0)[:n_emitted] or len(emitted) != n_emitted:
                return False
            if one.is_bonus != is_whole or one.n_accepted != n_emitted - 1:
                return False
    wide = np.array([0.2, 0.3, 0.5])
    outside = chain_of((2,), lambda prefix: wide)
    narrow = Case(2, 1, lambda prefix: row, lambda prefix: wide)
    return not any(outcome.n_accepted for outcome, _ in outcomes(walk, outside, narrow))


def match_tree() -> DraftTree:
    tree = DraftTree(0)
    first = tree.add(0, 1, -0.5)
    tree.add(0, 2, -1.0)
    second = tree.add(first, 0, -0.5)
    tree.add(first, 3, -0.9)
    tree.add(second, 2, -0.5)
    return tree


def match_is_exact(walk: Callable[..., Any]) -> bool:
    tree = match_tree()
    errors = [
        fixed_tree_error(match_rule, tree, CASES[0], walk=walk, **options)
        for options in ({}, {"max_tokens": 2}, {"stop_tokens": STOPS})
    ]
    script = (1, 0, 2, 3)  # down to the deepest leaf, and one more
    for limit, stops, n_emitted in (
        *((limit, frozenset(), min(limit, 4)) for limit in (1, 2, 3, 4, 5)),
        (4, frozenset({0}), 2),
        (4, STOPS, 1),
    ):
        outcome = walk(tree, lambda node: script[tree.depths[node]], limit, stops)
        if outcome.emitted(tree) != script[:n_emitted] or outcome.is_bonus != (n_emitted == 4):
            return False
    return max(errors) <= CAUGHT


def lenient_is_defined(lenient: Callable[..., Any]) -> bool:
    """Its choice at one node, against the definition written down."""
    p = np.array([0.1, 0.4, 0.3, 0.2])
    for drafted in ((), (0, 3), (2, 3), (0, 2, 5), (5,), (0, 1, 2, 3)):
        tree = DraftTree(0)
        for token in drafted:
            tree.add(0, token, -1.0)
        for own in range(4):
            for threshold in (0.05, 0.2, 0.25, 0.3, 1.0):
                likely = [one for one in drafted if one < 4 and p[one] >= threshold]
                is_own = own in drafted or not likely
                wanted = own if is_own else max(likely, key=lambda one: float(p[one]))
                choose = lenient(tree, lambda node, own=own: own, lambda node: p, threshold)
                if choose(0) != wanted:
                    return False
    return True


class _Uniforms:
    """Stands for a generator: gives these numbers in turn."""

    def __init__(self, *values: float) -> None:
        self._values = iter(values)

    def random(self) -> float:
        return next(self._values)


def drawing_is_right(module: ModuleType) -> bool:
    """Uniform numbers on a grid select each index in exactly its share of the grid."""
    probs = np.array([0.0, 2.0, 0.0, 5.0, 1.0]) / 16.0  # sums to 1/2: a row need not be normalised
    decisions = module.RandomDecisions(_Uniforms(*np.arange(8) / 8))
    picks = [decisions.categorical(probs) for _ in range(8)]
    if picks != [1, 1, 3, 3, 3, 3, 3, 4]:
        return False
    decisions = module.RandomDecisions(_Uniforms(0.0, 0.0, 0.25, 0.75, 1.0 - 2.0**-53))
    return [decisions.bernoulli(p) for p in (0.0, 0.5, 0.5, 0.5, 1.0)] == [
        False, True, True, False, True,
    ]  # fmt: skip


def residual_is_right(residual: Callable[..., Any]) -> bool:
    p, q = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.6, 0.3])
    halved = residual(p, np.array([0.1, 0.1, 0.8]), 0.5)
    return bool(
        np.allclose(residual(p, q), [1.0, 0.0, 0.0])
        and np.allclose(halved, [1.0, 0.0, 0.0])
        and np.array_equal(residual(p, p.copy()), p)
    )


def reference_row(params: SamplingParams, prefix: tuple[int, ...], logits: np.ndarray) -> Any:
    """log p of the first six ids: penalty, temperature, top-k, as their definitions say."""
    row = logits[:6].astype(np.float64)
    for token in set(prefix):
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if params.temperature:
        row /= params.temperature
        if params.top_k:
            row[row < np.sort(row)[-params.top_k]] = -np.inf
    peak = row.max()
    return row - peak - np.log(np.exp(row - peak).sum())


def sampler_is_defined(module: ModuleType) -> bool:
    """Choices and distributions, against log p + g of tables, penalty, temperature and seed."""
    rng = np.random.default_rng(8)
    all_params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=0.8, top_k=4, repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=1.2, seed=2**63 + 1),
    ]
    for params in all_params:
        sampler = module.Sampler(params, n_tokens=6)
        for position in range(2, 40):
            logits = rng.normal(size=8).astype(np.float32) * 2  # two padding rows
            logits[6:] += 5.0
            prefix = tuple(int(t) for t in rng.integers(0, 3, size=position))
            log_p = reference_row(params, prefix, logits)
            key = np.array([sampler.seed, position], dtype=np.uint64)
            noise = -np.log(-np.log(np.random.Generator(np.random.Philox(key=key)).random(6)))
            wanted = int((log_p + (0.0 if params.is_greedy else noise)).argmax())
            choose = sampler.chooser(lambda node, p=prefix: p, lambda node, row=logits: row)
            if choose(0) != wanted:
                return False
            p = np.eye(8)[wanted] if params.is_greedy else np.append(np.exp(log_p), (0.0, 0.0))
            if not np.allclose(sampler.probs(prefix, logits), p, atol=CAUGHT):
                return False
    return True


# --- the mistakes ---------------------------------------------------------------------------

IN_CHAIN_RULES = {
    "resample from p instead of the residual": (
        "recovered = decisions.categorical(residual(p, q))",
        "recovered = decisions.categorical(p)",
    ),
    "row of the parent": (
        "p = target_probs(path[-1])",
        "p = target_probs(path[max(len(path)-2,0)])",
    ),
    "row of the child": (
        "p = target_probs(path[-1])",
        "p = target_probs(next(iter(tree.children(path[-1]).values()), path[-1]))",
    ),
    "always the first row": ("p = target_probs(path[-1])", "p = target_probs(0)"),
    "refused by half": (
        "decisions.bernoulli(accept_probability(p, q, token))",
        "decisions.bernoulli(0.5 * accept_probability(p, q, token))",
    ),
    "lossy: half a chance more": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return min(1.0, 1.5 * likelihood_ratio(p, q, token))",
    ),
    "accept whenever p >= q, refuse otherwise": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return float(likelihood_ratio(p, q, token) >= 1.0)",
    ),
    "accept with p, whatever q": (
        "return min(1.0, likelihood_ratio(p, q, token))",
        "return float(p[token])",
    ),
    "ratio upside down": ("float(p[token] / q[token])", "float(q[token] / p[token])"),
    "tokens outside the vocabulary": ("if token >= len(p) or p[token] <= 0.0:", "if False:"),
    "residual the wrong way round": (
        "rest = np.maximum(weight * p - q, 0.0)",
        "rest = np.maximum(q - weight * p, 0.0)",
    ),
    "residual of either sign": (
        "rest = np.maximum(weight * p - q, 0.0)",
        "rest = np.abs(weight * p - q)",
    ),
    "residual not normalised": ("return rest / total if total", "return rest if total"),
    "residual divides by nothing": ("if total > np.finfo(np.float64).eps else p", ""),
    "draft row in half precision": (
        "q[:shared] = row[:shared]",
        "q[:shared] = row[:shared].astype(np.float16)",
    ),
    "draft row shifted by one": ("q[:shared] = row[:shared]", "q[1:shared] = row[: shared - 1]"),
    "goes on behind a stop token": ("return token in stops or (", "return ("),
    "one token too many": ("n_emitted >= max_tokens", "n_emitted > max_tokens"),
    "the last token wanted is emitted twice": (
        "return Acceptance(tuple(path), token, is_bonus=False)",
        "return Acceptance((*path, child), token, is_bonus=False)",
    ),
    "a bonus is called recovered": (
        "return Acceptance(tuple(path), decisions.categorical(p), is_bonus=True)",
        "return Acceptance(tuple(path), decisions.categorical(p), is_bonus=False)",
    ),
    "drawing: tokens of probability 0": ('side="right"', 'side="left"'),
    "drawing: as if normalised": ("uniform * cumulative[-1]", "uniform"),
    "drawing: the other outcome": ("self._rng.random() < p", "self._rng.random() >= p"),
    "drawing: what cannot happen": ("self._rng.random() < p", "self._rng.random() <= p"),
}
IN_MATCH_WALK = {
    "draws again where the draw was not drafted": (
        "token = int(choose(node))\n",
        "token = int(choose(node))\n"
        "        token = token if token in tree.children(node) else int(choose(node))\n",
    ),
    "follows the draft, not the target": (
        "child = tree.children(node).get(token)",
        "child = next(iter(tree.children(node).values()), None)",
    ),
    "row of the parent": (
        "token = int(choose(node))\n",
        "token = int(choose(max(tree.parents[node], 0)))\n",
    ),
    "row of the neighbour": (
        "token = int(choose(node))\n",
        "token = int(choose(min(node + 1, len(tree) - 1) if node else node))\n",
    ),
    "goes on where the text ends": (
        "if child is None or is_last(token, len(path), max_tokens, stop_tokens):",
        "if child is None:",
    ),
    "goes on behind a stop token": ("return token in stops or (", "return ("),
    "one token too many": ("n_emitted >= max_tokens", "n_emitted > max_tokens"),
    "counts the root": (
        "if child is None or is_last(token, len(path), max_tokens",
        "if child is None or is_last(token, len(path) - 1, max_tokens",
    ),
    "bonus and recovered mixed up": (
        "is_bonus=not tree.children(node))",
        "is_bonus=bool(tree.children(node)))",
    ),
}  # fmt: skip
IN_LENIENT = {
    "the least likely one": ("best = max(known", "best = min(known"),
    "also below the threshold": ("p[best] >= threshold", "p[best] >= 0.0"),
    "not at the threshold": ("p[best] >= threshold", "p[best] > threshold"),
    "the target's own drafted token is passed over": (
        "not drafted or token in drafted",
        "not drafted",
    ),
    "ids outside the vocabulary": ("[one for one in drafted if one < len(p)]", "list(drafted)"),
    "never": ("return best if", "return token if"),
}  # fmt: skip
IN_BLOCK = {
    "weight: each token alone": (
        "min(block.weights[-1] * likelihood_ratio(p, q, token), 1.0)",
        "min(likelihood_ratio(p, q, token), 1.0)",
    ),
    "weight: not bounded by 1": (
        "min(block.weights[-1] * likelihood_ratio(p, q, token), 1.0)",
        "block.weights[-1] * likelihood_ratio(p, q, token)",
    ),
    "weight: a likely token makes up for nothing": (
        "min(block.weights[-1] * likelihood_ratio(p, q, token), 1.0)",
        "block.weights[-1] * min(likelihood_ratio(p, q, token), 1.0)",
    ),
    "the first success, not the longest": (
        "range(len(block.rows), 0, -1)",
        "range(1, len(block.rows) + 1)",
    ),
    "every token judged as if it were the last": ("is_end = i == len(block.rows)", "is_end = True"),
    "uncovered mass: p not weighted": (
        "np.maximum(weight * p - q, 0.0)",
        "np.maximum(p - q, 0.0)",
    ),
    "uncovered mass: the wrong way round": (
        "np.maximum(weight * p - q, 0.0)",
        "np.maximum(q - weight * p, 0.0)",
    ),
    "uncovered mass not related to the rest": ("uncovered / whole if", "uncovered if"),
    "the rest without the weight": ("uncovered + (1.0 - weight)", "uncovered + 1.0"),
    "row of the token before": ("*block.rows[i])", "*block.rows[i - 1])"),
    "residual: p not weighted": (
        "residual(p, q, block.weights[n_accepted])",
        "residual(p, q)",
    ),
    "residual: the weight of the end": (
        "residual(p, q, block.weights[n_accepted])",
        "residual(p, q, block.weights[-1])",
    ),
    "residual: the first row": ("p, q = block.rows[n_accepted]", "p, q = block.rows[0]"),
    "resample from p instead of the residual": (
        "decisions.categorical(residual(p, q, block.weights[n_accepted]))",
        "decisions.categorical(p)",
    ),
    "bonus in the wrong row": (
        "decisions.categorical(target_probs(path[-1]))",
        "decisions.categorical(target_probs(path[max(len(path) - 2, 0)]))",
    ),
    "row of the parent": (
        "p = target_probs(node)",
        "p = target_probs(max(tree.parents[node], 0))",
    ),
    "row of the child": ("p = target_probs(node)", "p = target_probs(child)"),
    "goes on where the text ends": (
        "is_last(token, len(block.rows), max_tokens, stop_tokens)",
        "False",
    ),
    "one token too many": (
        "is_last(token, len(block.rows), max",
        "is_last(token, len(block.rows) - 1, max",
    ),
    "a bonus behind the end": ("if block.ends_text:", "if False:"),
    "the end is emitted twice": ("Acceptance(path[:-1], tree", "Acceptance(path, tree"),
    "the text's end is not accepted": (
        "is_end = i == len(block.rows)",
        "is_end = i == len(block.rows)\n"
        "        if is_end and block.ends_text:\n"
        "            continue",
    ),
    "a bonus is called recovered": (
        "(target_probs(path[-1])), is_bonus=True",
        "(target_probs(path[-1])), is_bonus=False",
    ),
    "one token less": ("            return i\n", "            return i - 1\n"),
}  # fmt: skip
IN_SAMPLER = {
    "noise: the same at every position": ("np.array([seed, position]", "np.array([seed, 0]"),
    "noise: the same for every seed": ("np.array([seed, position]", "np.array([0, position]"),
    "noise: of the next position": ("position=len(prefix))", "position=len(prefix) + 1)"),
    "noise: by rank, not by token": (
        "_uniforms(seed, position, int(ids.max()) + 1)[ids]",
        "_uniforms(seed, position, ids.size)",
    ),
    "noise: exponential": (
        "return -np.log(-np.log(_uniforms(seed, position, int(ids.max()) + 1)[ids]))",
        "return -np.log(_uniforms(seed, position, int(ids.max()) + 1)[ids])",
    ),
    "noise: subtracted": (".astype(np.float64) + noise)", ".astype(np.float64) - noise)"),
    "noise: left out": (".astype(np.float64) + noise)", ".astype(np.float64))"),
    "greedy with noise": (
        "        if self.is_greedy:\n            return int(scores.argmax())",
        "        if False:\n            return 0",
    ),
    "index among what is left, not a token": (
        "return int(alive[(scores[alive].astype(np.float64) + noise).argmax()])",
        "return int((scores[alive].astype(np.float64) + noise).argmax())",
    ),
    "padding rows": (
        "return np.asarray(logits, dtype=np.float32)[: self.n_tokens]",
        "return np.asarray(logits, dtype=np.float32)",
    ),
    "processors left out": ("scores = self._pipeline(prefix_ids, row)", "scores = row"),
    "processors do not see the last token": (
        "self._pipeline(prefix_ids, row)",
        "self._pipeline(prefix_ids[:-1], row)",
    ),
    "greedy p of the raw row": (
        "one_hot[int(self.scores(prefix_ids, logits).argmax())] = 1.0",
        "one_hot[int(logits[: self.n_tokens].argmax())] = 1.0",
    ),
    "p not normalised": ("np.asarray(p / p.sum())", "np.asarray(p / p.max())"),
    "p of the raw row": (
        "p = np.exp(self.log_probs(prefix_ids, logits))",
        "p = np.exp(logits.astype(np.float64))",
    ),
}
CHECKS: dict[str, tuple[ModuleType, dict[str, tuple[str, str]], Callable[[Any], bool]]] = {
    "rejection": (
        acceptance,
        IN_CHAIN_RULES,
        lambda module: (
            drawing_is_right(module)
            and residual_is_right(module.residual)
            and chain_is_exact(module.rejection_walk)
        ),
    ),
    "match": (acceptance, IN_MATCH_WALK, lambda module: match_is_exact(module.match_walk)),
    "lenient": (acceptance, IN_LENIENT, lambda module: lenient_is_defined(module.lenient)),
    "block": (block_verification, IN_BLOCK, lambda module: chain_is_exact(module.block_walk)),
    "sampler": (sampling, IN_SAMPLER, sampler_is_defined),
}
MUTANTS = [(rule, name) for rule, (_, mistakes, _) in CHECKS.items() for name in mistakes]


@pytest.mark.parametrize("rule", CHECKS)
def test_the_source_without_a_mistake_passes(rule: str) -> None:
    module, _, check = CHECKS[rule]
    assert check(module)


@pytest.mark.parametrize(("rule", "name"), MUTANTS)
def test_mutant_is_caught(rule: str, name: str) -> None:
    """By a wrong result, or by an error that comes of it."""
    module, mistakes, check = CHECKS[rule]
    changed = mutated(module, *mistakes[name])
    with np.errstate(all="ignore"):
        try:
            is_right = check(changed)
        except (ValueError, IndexError, sampling.SamplingError):
            return
    assert not is_right
