"""Mistakes in the match rule and in its lossy sibling: the checks catch every one."""

from __future__ import annotations

import pytest
from definitions import lenient_is_defined, match_is_exact
from mutants import is_caught

from specdec.verification import acceptance

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


@pytest.mark.parametrize("name", IN_MATCH_WALK)
def test_mutant_of_the_match_walk_is_caught(name: str) -> None:
    assert is_caught(acceptance, IN_MATCH_WALK[name], lambda m: match_is_exact(m.match_walk))


@pytest.mark.parametrize("name", IN_LENIENT)
def test_mutant_of_the_lossy_rule_is_caught(name: str) -> None:
    assert is_caught(acceptance, IN_LENIENT[name], lambda m: lenient_is_defined(m.lenient))
