"""The drafter of known accuracy: its proposals, and the formula that they satisfy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from generating import run
from table_backend import TableBackend

from bench.decode.curve_figures import standard_error
from bench.decode.known_drafter import AccuracyError, KnownAccuracyDrafter, expected_tokens
from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

VOCAB = 50
TEXT = [(7 * i + 3) % VOCAB for i in range(200)]


def n_right(chain: list[int], context: int) -> int:
    """Number of leading chain tokens that continue the sequence."""
    at = TEXT[context : context + len(chain)]
    return next((i for i, (a, b) in enumerate(zip(chain, at, strict=True)) if a != b), len(chain))


@pytest.mark.parametrize(("accuracy", "n"), [(0.5, 1), (0.8, 4), (0.95, 16), (1.0, 3)])
def test_tokens_per_pass_of_the_paper(accuracy: float, n: int) -> None:
    """Leviathan et al. 2023, equation 1, and the same by enumerating right and wrong guesses."""
    by_formula = n + 1 if accuracy == 1 else (1 - accuracy ** (n + 1)) / (1 - accuracy)
    assert expected_tokens(accuracy, n) == pytest.approx(by_formula)
    if n > 4:
        return
    mean = square = 0.0
    for right in product((True, False), repeat=n):
        weight = math.prod(accuracy if item else 1 - accuracy for item in right)
        tokens = 1 + (right.index(False) if False in right else n)
        mean, square = mean + weight * tokens, square + weight * tokens**2
    assert mean == pytest.approx(by_formula)
    assert standard_error(accuracy, n, 9) == pytest.approx(
        math.sqrt(max(0.0, square - mean**2)) / 3, abs=1e-7
    )


@pytest.mark.parametrize(("accuracy", "n"), [(0.5, 3), (0.9, 8), (1.0, 5)])
def test_guesses_are_right_as_often_as_asked(accuracy: float, n: int) -> None:
    drafter = KnownAccuracyDrafter(TEXT, accuracy, VOCAB, seed=(1, 2))
    n_steps = 4000
    tokens = 0
    for i in range(n_steps):
        context = 1 + i % 100
        tree = drafter.propose(TEXT[:context], TreeLimits(n, n, 1))
        assert tree.is_chain
        assert tree.n_drafted == n
        assert all(0 <= token < VOCAB for token in tree.token_ids)
        tokens += 1 + n_right(tree.token_ids[1:], context)
    error = standard_error(accuracy, n, n_steps)
    assert abs(tokens / n_steps - expected_tokens(accuracy, n)) <= 4 * error


def test_guesses_repeat_with_their_seed_only() -> None:
    limits = TreeLimits(30, 30, 1)
    first, same, other = (
        KnownAccuracyDrafter(TEXT, 0.5, VOCAB, seed).propose(TEXT[:5], limits).token_ids
        for seed in ((1, 0), (1, 0), (1, 1))
    )
    assert first == same != other


def test_chains_end_with_the_limits_and_with_the_sequence() -> None:
    drafter = KnownAccuracyDrafter(TEXT, 1.0, VOCAB, seed=(0,))
    assert drafter.propose(TEXT[:10], TreeLimits(8, 3, 1)).token_ids == TEXT[9:13]
    assert drafter.propose(TEXT[:10], TreeLimits(2, 9, 1)).token_ids == TEXT[9:12]
    assert drafter.propose(TEXT[:198], TreeLimits(8, 8, 1)).token_ids == TEXT[197:]
    assert drafter.propose(TEXT, TreeLimits(8, 8, 1)).n_drafted == 0


def test_no_proposal_for_another_sequence() -> None:
    drafter = KnownAccuracyDrafter(TEXT, 1.0, VOCAB, seed=(0,))
    assert drafter.propose([*TEXT[:9], TEXT[9] + 1], TreeLimits(8, 8, 1)).n_drafted == 0


@pytest.mark.parametrize("accuracy", [0.0, -0.1, 1.1, math.nan])
def test_other_accuracies_are_refused(accuracy: float) -> None:
    with pytest.raises(AccuracyError, match="above 0"):
        KnownAccuracyDrafter(TEXT, accuracy, VOCAB, seed=(0,))


def rows(prefix: Sequence[int]) -> np.ndarray:
    """Logits with one likely token after each prefix."""
    p = np.full(VOCAB, 0.5 / VOCAB)
    p[(sum(prefix[-3:]) * 5 + len(prefix)) % VOCAB] += 0.5
    return p


class Counting(KnownAccuracyDrafter):
    """Record the tokens of every pass over a whole chain."""

    def __init__(self, *args: object, n: int) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.n, self.tokens = n, []

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        if tree.n_drafted == self.n:
            self.tokens.append(acceptance.n_accepted + 1)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(("accuracy", "n"), [(0.5, 4), (0.9, 8), (0.95, 16)])
def test_the_controller_accepts_what_the_formula_says(accuracy: float, n: int) -> None:
    prompt = [1, 2, 3]
    target = TableBackend(rows, VOCAB, max_context=4000)
    text = run(target, prompt, 1500)
    drafter = Counting([*prompt, *text], accuracy, VOCAB, (7,), n=n)
    spec = SpecConfig(num_draft_tokens=n, tree_width=1, draft_depth=n)
    assert run(target, prompt, 1500, drafter, spec=spec) == text
    mean, n_passes = sum(drafter.tokens) / len(drafter.tokens), len(drafter.tokens)
    assert abs(mean - expected_tokens(accuracy, n)) <= 4 * standard_error(accuracy, n, n_passes)
