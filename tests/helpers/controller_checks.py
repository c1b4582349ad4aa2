"""Properties of whole steps of the controller and the model drafter, on tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import repeat
from typing import Any

import numpy as np
from exact_rules import (
    Case,
    ScriptedDecisions,
    completed_joint,
    enumerate_outcomes,
    table_rows,
    target_joint,
)
from generating import LoneSequence, SteppedAhead, limits_after, make_controller, run
from table_backend import TableBackend

from specdec.config import CHAIN_RULES, SpecConfig
from specdec.drafters.chain import DrawnChain
from specdec.drafters.model import ModelDrafter
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.verification.tree import DraftTree

CAUGHT = 1e-6  # far above rounding, far below the error of any mutant
VOCAB, DEPTH, N_TOKENS = 8, 2, 40
PROMPT = [1, 2]
TARGET, OTHER = table_rows(VOCAB, seed=3), table_rows(VOCAB, seed=4)
# The penalty makes a row depend on the prefix passed to the processors.
PARAMS = SamplingParams(temperature=0.8, top_k=2, repetition_penalty=1.4, seed=6)


class Recording(ScriptedDecisions):
    """Scripted decisions that also replace the generator of the drafter."""

    def random(self) -> Recording:
        return self


def chain_controller(
    draft_rows: Any,
    rng: Any,
    depth: int,
    rule: str = "rejection",
) -> LoneSequence:
    spec = SpecConfig(num_draft_tokens=depth, draft_depth=depth, acceptance=rule)
    sampler = Sampler(PARAMS, n_tokens=VOCAB, prompt_length=len(PROMPT))
    drafter = ModelDrafter(TableBackend(draft_rows, VOCAB), VOCAB, chain=(sampler, rng))
    return LoneSequence(TableBackend(TARGET, VOCAB), drafter, sampler, spec, rng=rng)


def steps_error(rule: str = "rejection") -> float:
    """Return the largest error of the distribution that two steps of a chain rule emit.

    All decisions are enumerated: what the drafter draws and what the rule decides.
    """

    def two_steps(decisions: ScriptedDecisions) -> tuple[int, ...]:
        recording = Recording(decisions._script)
        made = chain_controller(OTHER, recording, DEPTH, rule)
        made.start(PROMPT)
        tokens = [token for _ in range(2) for token in made.step(99).token_ids]
        vars(decisions).update(vars(recording))
        return tuple(tokens)

    names = DrawnChain.draw.__globals__
    original = names["sample_index"]
    names["sample_index"] = lambda probs, decisions: decisions.categorical(probs)
    try:
        emitted: dict[tuple[int, ...], float] = {}
        for tokens, weight in enumerate_outcomes(two_steps):
            emitted[tokens] = emitted.get(tokens, 0.0) + weight
    finally:
        names["sample_index"] = original
    case = Case(VOCAB, 2 * (DEPTH + 1) - 1, target_after_start(), OTHER)
    expected = target_joint(case.target, VOCAB, case.depth + 1)
    return float(np.abs(completed_joint(emitted, case) - expected).max())


def steps_are_exact() -> bool:
    return all(steps_error(rule) <= CAUGHT for rule in CHAIN_RULES)


def target_after_start() -> Callable[[tuple[int, ...]], np.ndarray]:
    """Return p after the prompt, its first token (the seed's) and more, by the sampler itself."""
    sampler = Sampler(PARAMS, n_tokens=VOCAB, prompt_length=len(PROMPT))
    backend = TableBackend(TARGET, VOCAB)
    first = sampler.choose(PROMPT, backend.logits(PROMPT), position=len(PROMPT))

    @cache
    def rows(tokens: tuple[int, ...]) -> np.ndarray:
        prefix = [*PROMPT, first, *tokens]
        return sampler.probs(prefix, backend.logits(prefix))

    return rows


def equals_plain_decoding() -> bool:
    """Compare greedy and sampled tokens with plain decoding, with a good and a bad draft."""

    for params in (SamplingParams(), PARAMS):
        # Plain decoding is the unmutated reference.
        plain = run(TableBackend(TARGET, VOCAB), PROMPT, N_TOKENS, params=params)
        for rows in (TARGET, OTHER):
            guess = ModelDrafter(TableBackend(rows, VOCAB), VOCAB)
            spec = SpecConfig(num_draft_tokens=6, draft_depth=4)
            target = TableBackend(TARGET, VOCAB)
            if run(target, PROMPT, N_TOKENS, guess, params, spec=spec) != plain:
                return False
    return True


def accepts_itself() -> bool:
    """Check that a target drafting for itself has every chain accepted, by either rule."""
    depth, rng = 4, np.random.default_rng(2)
    spec = SpecConfig(num_draft_tokens=depth, tree_width=1, draft_depth=depth)
    for last in range(VOCAB):
        sampled = chain_controller(TARGET, rng, depth)
        target, draft = TableBackend(TARGET, VOCAB), TableBackend(TARGET, VOCAB)
        greedy = make_controller(target, ModelDrafter(draft, VOCAB), spec=spec)
        for made in (sampled, greedy):
            made.start([*PROMPT, last])
            if any(made.step(99).acceptance.n_accepted < depth for _ in range(4)):
                return False
    return True


def drafts_what_a_new_drafter_drafts() -> bool:
    """Check that each proposal equals that of a new drafter, whatever was drafted in parallel."""
    spec = SpecConfig(num_draft_tokens=6, tree_width=3, draft_depth=4, draft_ahead="on")
    for rows, n_levels in ((TARGET, 4), (OTHER, 1), (OTHER, 6)):
        guess = ModelDrafter(TableBackend(rows, VOCAB), VOCAB)
        made = make_controller(
            TableBackend(TARGET, VOCAB),
            guess,
            spec=spec,
            ahead=SteppedAhead(repeat(n_levels)),
        )
        made.start(PROMPT)
        for _ in range(12):
            context = list(made.context)
            tree = made.step(99).tree
            limits = limits_after(context, spec)
            new = ModelDrafter(TableBackend(rows, VOCAB), VOCAB).propose(context, limits)
            if paths_of(tree) != paths_of(new):
                return False
    return True


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tree.tokens_on_path(i): round(tree.log_probs[i], 6) for i in range(len(tree))}


CHECKS = (
    equals_plain_decoding,
    accepts_itself,
    steps_are_exact,
    drafts_what_a_new_drafter_drafts,
)
