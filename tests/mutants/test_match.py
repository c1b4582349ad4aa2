"""Mistakes in the match rule and in its lossy sibling: exact tests catch every one.

Those of test_acceptance_exact.py, and the definitions of test_accept_threshold.py.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from chain_checks import CASES, CAUGHT, STOPS
from exact_rules import fixed_tree_error, match_rule
from mutants import is_caught

from specdec.verification import acceptance
from specdec.verification.tree import DraftTree

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


CHECKS: dict[str, tuple[dict[str, tuple[str, str]], Callable[[ModuleType], bool]]] = {
    "match": (IN_MATCH_WALK, lambda module: match_is_exact(module.match_walk)),
    "lenient": (IN_LENIENT, lambda module: lenient_is_defined(module.lenient)),
}
MUTANTS = [(rule, name) for rule, (mistakes, _) in CHECKS.items() for name in mistakes]


@pytest.mark.parametrize("rule", CHECKS)
def test_the_source_without_a_mistake_passes(rule: str) -> None:
    assert CHECKS[rule][1](acceptance)


@pytest.mark.parametrize(("rule", "name"), MUTANTS)
def test_mutant_is_caught(rule: str, name: str) -> None:
    mistakes, check = CHECKS[rule]
    assert is_caught(acceptance, mistakes[name], check)
