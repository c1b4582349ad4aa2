"""What keeping the policy's choices apart by the number of texts brings: worlds of many texts.

    python -m bench.worlds.together

In virtual time, without models. A server's day: one text, then sixteen at once, then one again, and
so on, all with one experience. Prints a table in Markdown: tokens per second against one choice for
all numbers of texts, apart for the texts that are alone and for those that are together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.worlds.ablation import patched
from bench.worlds.settings import NOT_WORTH_IT, OTHERS, SIX
from bench.worlds.world import NEVER, Clock, World, chooser, drafters_of, pass_seconds, text_of
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.experience import Experience, Lessons
from specdec.policy.shared_round import observe_together, trim_together
from specdec.verification.acceptance import match_walk
from specdec.verification.tree import DraftTree

PHASES = (1, 16, 1, 16, 1, 16)
"""Texts at once."""
N_TOKENS = 64
SEEDS = range(3000, 3004)
MAX_ROWS = 512
WORLDS: Mapping[str, World] = {
    name: world
    for name, world in {**SIX, **OTHERS, **NOT_WORTH_IT}.items()
    if world.draft is not None and world.change_at == NEVER
}


@dataclass
class Member:
    """One of the texts that share rounds."""

    text: Any
    drafter: Drafter
    policy: DraftPolicy
    context: list[int]
    n_tokens: int = 0


def decode_together(
    world: World, experience: Experience, clock: Clock, n_texts: int
) -> tuple[int, float]:
    """(tokens, virtual seconds) of so many texts that begin at once."""
    noise = np.random.default_rng((world.seed, n_texts))
    members = [_member(replace(world, seed=world.seed + 97 * i), experience, clock, noise)
               for i in range(n_texts)]  # fmt: skip
    began = clock.now
    while members_left := [one for one in members if one.n_tokens < N_TOKENS]:
        _round(world, members_left, clock, noise)
    return sum(one.n_tokens for one in members), clock.now - began


def _member(
    world: World, experience: Experience, clock: Clock, noise: np.random.Generator
) -> Member:
    text, spec = text_of(world, N_TOKENS), SpecConfig()
    drafter, _ = drafters_of(world, spec, text, Clock(), noise)
    policy = DraftPolicy(
        spec, world.planned(), NEVER, world.planned_draft(), world.max_nodes,
        experience=experience, clock=clock,
    )  # fmt: skip
    return Member(text, drafter, policy, [0])


def _round(
    world: World, members: Sequence[Member], clock: Clock, noise: np.random.Generator
) -> None:
    n_texts = len(members)
    trees = []
    for one in members:
        limits = one.policy.limits(len(one.context), NEVER, NEVER, n_texts)
        trees.append(one.drafter.propose(one.context, limits))
    clock.now += _draft_seconds(world, trees)
    policies = [one.policy for one in members]
    kept = trim_together(policies, trees, 0, MAX_ROWS - n_texts)
    seconds = pass_seconds(world, sum(map(len, kept)), 0, is_ahead=False)
    clock.now += seconds * (1.0 + world.pass_noise * abs(noise.normal()))
    acceptances = []
    for one, tree in zip(members, kept, strict=True):
        acceptances.append(match_walk(tree, chooser(one.text, tree, len(one.context))))
    observe_together(policies, acceptances, kept)
    for one, tree, acceptance in zip(members, kept, acceptances, strict=True):
        tokens = acceptance.emitted(tree)
        one.context.extend(tokens)
        one.n_tokens += len(tokens)


def _draft_seconds(world: World, trees: Sequence[DraftTree]) -> float:
    """A level of all texts is one run."""
    assert world.draft is not None
    n_runs = max(tree.n_runs for tree in trees)
    n_nodes = sum(tree.n_run_nodes for tree in trees)
    return n_runs * world.draft.run_seconds + n_nodes * world.draft.run_node_seconds


def rates(world: World) -> tuple[float, float]:
    """Tokens per second of texts that are alone, and of those that are together."""
    sums = {n: np.zeros(2) for n in PHASES}
    for seed in SEEDS:
        experience = Experience(
            world.planned(), world.planned_draft(), world.max_nodes, max_rows=MAX_ROWS
        )
        clock = Clock()
        for i, n_texts in enumerate(PHASES):
            own = replace(world, seed=seed + 10_000 * i)
            sums[n_texts] += decode_together(own, experience, clock, n_texts)
    alone, together = (float(sums[n][0] / sums[n][1]) for n in (min(PHASES), max(PHASES)))
    return alone, together


def main() -> None:
    choice = Lessons.choice
    one_for_all = [(Lessons, "choice", lambda lessons, n_texts=1: choice(lessons, 1))]
    print("| world | one text | sixteen texts |\n|---|---|---|")
    ratios = []
    for name, world in WORLDS.items():
        apart = np.array(rates(world))
        with patched(one_for_all):
            ratios.append(apart / np.array(rates(world)))
        print(f"| {name} | {ratios[-1][0]:.3f} | {ratios[-1][1]:.3f} |", flush=True)
    mean, worst = np.mean(ratios, axis=0), np.min(ratios, axis=0)
    print(f"| mean | {mean[0]:.3f} | {mean[1]:.3f} |\n| worst | {worst[0]:.3f} | {worst[1]:.3f} |")


if __name__ == "__main__":
    main()
