"""Mistakes in block verification: the exact check of rules for chains catches every one."""

from __future__ import annotations

import pytest
from chain_checks import chain_is_exact
from mutants import is_caught

from specdec.verification import block as block_verification

MISTAKES = {
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


@pytest.mark.parametrize("name", MISTAKES)
def test_mutant_is_caught(name: str) -> None:
    assert is_caught(block_verification, MISTAKES[name], lambda m: chain_is_exact(m.block_walk))
