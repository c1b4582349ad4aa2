"""Simulation scenario without models, in virtual time: sequences, a draft with known errors, costs.

The output is fixed in advance, token by token. At every position the draft has WIDTH candidates
with probabilities q that depend on the position (easy and hard passages) and on the token before,
whether that one is right or not: wrong nodes look as good as right ones. The output's token is
candidate k with probability c_k, and c differs from q by `sharpness` and `bias` (the draft is over-
or underconfident), so a policy that believes q is misled. Times have noise, and the plan that the
policy starts from is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np

from specdec.config import SpecConfig
from specdec.drafters.base import Drafter, TreeLimits
from specdec.drafters.merged import MergedDrafter
from specdec.policy.cost_model import CostModel
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.policy.shared_step import observe_together, should_draft_ahead, trim_together
from specdec.verification.acceptance import verify_match
from specdec.verification.tree import ROOT, DraftTree

WIDTH = 6
OTHER = WIDTH  # the output's token is none of the candidates
MAX_BEAMS = 12
MAX_NODES = 96
NEVER = 10**9
STUMBLE = 5.0  # factor of an outlier, caused by another program


@dataclass(frozen=True)
class Draft:
    """Behaviour of a draft model. Probabilities in logits."""

    ease: float = 1.5  # mean of logit(q) of the best candidate
    spread: float = 1.5  # of its slow changes over the output
    jitter: float = 1.0  # of its changes from node to node
    sharpness: float = 1.0
    bias: float = 0.0  # logit of the truth = sharpness * logit(q) + bias
    coverage: float = 0.8  # probability that another candidate is right where the best one is not
    run_seconds: float = 0.02
    run_node_seconds: float = 0.0005


@dataclass(frozen=True)
class Scenario:
    """Costs and sequences. The second draft and read speed begin at `change_at`."""

    target: CostModel
    draft: Draft | None = None
    copied_share: float = 0.0  # of the output in passages that n-grams predict
    passage: tuple[int, int] = (20, 50)  # tokens of one: minimum and exclusive maximum
    planned_error: float = 0.7  # of arithmetic: planned / true
    pass_noise: float = 0.05
    stumbles: float = 0.0  # share of passes that another program slows down fivefold
    change_at: int = NEVER
    slower: float = 1.0  # reads take so many times as long after the change
    draft_after: Draft | None = None
    seed: int = 0
    hit_rate: float = 0.0  # of parallel drafting
    slowdown: float = 1.0  # of a pass with parallel drafting
    max_nodes: int = MAX_NODES  # that memory is reserved for

    def planned(self) -> CostModel:
        off, cost = self.planned_error, self.target
        return CostModel(cost.read_seconds, off * cost.fixed_seconds, off * cost.seconds_per_token)

    def planned_draft(self) -> CostModel | None:
        if self.draft is None:
            return None
        off = self.planned_error
        return CostModel(0.0, off * self.draft.run_seconds, off * self.draft.run_node_seconds)


class Text:
    """Tokens that the target will choose, and the draft's logits at each position."""

    def __init__(self, scenario: Scenario, n_tokens: int) -> None:
        rng = np.random.default_rng(scenario.seed)
        size = n_tokens + 80
        self.logit_q = np.zeros((size, WIDTH + 1))  # [position, token before], best candidate
        self.tokens = np.full(size, OTHER)
        self.is_copied = np.zeros(size, dtype=bool)
        draft = scenario.draft or Draft()
        slow, before = 0.0, 0
        passage = 0
        for t in range(size):
            if t == scenario.change_at and scenario.draft_after is not None:
                draft = scenario.draft_after
            slow = 0.95 * slow + np.sqrt(1 - 0.95**2) * rng.normal()
            jitter = draft.jitter * rng.normal(size=WIDTH + 1)
            self.logit_q[t] = draft.ease + draft.spread * slow + jitter
            mean = sum(scenario.passage) / 2
            # The share of the tokens between passages after which one begins.
            begins = scenario.copied_share / (0.86 * mean)
            if passage == 0 and rng.random() < begins:
                passage = int(rng.integers(*scenario.passage))
            passage = max(0, passage - 1)
            self.is_copied[t] = passage > 0
            before = self.tokens[t] = self._draw(draft, self.logit_q[t, before], rng.random())

    @staticmethod
    def _draw(draft: Draft, logit_q: float, uniform: float) -> int:
        best = _sigmoid(draft.sharpness * logit_q + draft.bias)
        rest = (1.0 - best) * draft.coverage * candidate_shares()[1:]
        probs = np.concatenate(([best], rest))
        return int(np.searchsorted(np.cumsum(probs), uniform))


text_of = lru_cache(maxsize=2)(Text)  # the same for every mode of decoding it


@cache
def candidate_shares() -> np.ndarray:
    """Return each candidate's share of the probability that the best one leaves; index 0 is 0."""
    shares = 0.5 ** np.arange(WIDTH)
    shares[0] = 0.0
    return shares / shares.sum()


def _sigmoid(x: float) -> float:
    return float(1.0 / (1.0 + np.exp(-x)))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimulatedDraft(Drafter):
    """Drafter that grows trees level by level as ModelDrafter does, in virtual time."""

    text: Text
    draft: Draft
    clock: Clock
    noise: np.random.Generator
    is_hidden: bool = False  # this drafting was done in parallel
    n_fresh_runs: int = 0  # of the last tree that was not drafted in parallel
    log_shares: np.ndarray = field(default_factory=lambda: np.log(candidate_shares()[1:]))

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree = DraftTree(context_ids[-1])
        if min(limits.max_nodes, limits.max_depth) < 1 or limits.min_level_probability > 1.0:
            return tree
        began, level = self.clock.now, [ROOT]
        for depth in range(1, limits.max_depth + 1):
            self._run(tree, len(level))
            newest = self._branch(tree, level, len(context_ids) + depth - 1, limits)
            worst = _nth_best(tree, limits.max_nodes)
            ranked = sorted(newest, key=lambda i: -tree.path_log_probs[i])[:MAX_BEAMS]
            level = [i for i in ranked if tree.path_log_probs[i] > worst]
            known = limits.known or DraftTree(tree.token_ids[ROOT])
            paths = {i: tree.tokens_on_path(i) for i in level}
            new = [i for i in level if len(known.follow(paths[i])) <= len(paths[i])]
            probability = sum(np.exp(tree.path_log_probs[i]) for i in new)
            if not level:
                break
            if probability < limits.min_level_probability and not self._is_run_ahead(depth):
                break
        if self.is_hidden:  # it ran beside the pass
            self.clock.now, tree.n_runs, tree.n_run_nodes = began, 0, 0
        else:
            self.n_fresh_runs = depth
        return tree.best_subset(limits.max_nodes)

    def _is_run_ahead(self, depth: int) -> bool:
        """Return whether this depth was drafted in parallel, so that its cost does not matter."""
        return self.is_hidden and depth < self.n_fresh_runs

    def _run(self, tree: DraftTree, n_nodes: int) -> None:
        seconds = self.draft.run_seconds + n_nodes * self.draft.run_node_seconds
        self.clock.now += seconds * (1.0 + 0.05 * abs(self.noise.normal()))
        tree.n_runs += 1
        tree.n_run_nodes += n_nodes

    def _branch(
        self, tree: DraftTree, level: list[int], position: int, limits: TreeLimits
    ) -> list[int]:
        worst, newest = _nth_best(tree, limits.max_nodes), []
        for node in level:
            best = _sigmoid(self.text.logit_q[position, tree.token_ids[node]])
            log_qs = [np.log(best), *(np.log1p(-best) + self.log_shares)]
            for token, log_q in enumerate(log_qs[: limits.width]):
                if tree.path_log_probs[node] + log_q <= worst:
                    break
                newest.append(tree.add(node, token, float(log_q)))
        return newest


@dataclass
class SimulatedNgrams(Drafter):
    """N-gram drafter that is right in copied passages and mostly wrong elsewhere."""

    text: Text

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        tree, start = DraftTree(context_ids[-1]), len(context_ids)
        is_copied = self.text.is_copied[start]
        if not is_copied and start % 3:
            return tree
        node = ROOT
        for t in range(start, start + min(limits.max_depth, limits.max_nodes)):
            right = int(self.text.tokens[t])
            is_right = is_copied and self.text.is_copied[t] and t % 17
            token = right if is_right else (right + 1) % (WIDTH + 1)
            node = tree.add(node, token, float(np.log(0.85 if is_copied else 0.5)), "ngram")
        return tree


def _nth_best(tree: DraftTree, n: int) -> float:
    if tree.n_drafted < n:
        return -np.inf
    return sorted(tree.path_log_probs[1:], reverse=True)[n - 1]


@dataclass(frozen=True)
class Outcome:
    """Virtual time and tokens so far after every step, and the sizes of the trees."""

    times: list[float]
    counts: list[int]
    sizes: list[int]

    def at(self, n_tokens: int) -> tuple[int, float]:
        """Return (tokens, virtual time) after the step that emitted the n-th token."""
        i = next(i for i, count in enumerate(self.counts) if count >= n_tokens)
        return self.counts[i], self.times[i]

    def rate(self, first: int = 0) -> float:
        """Return tokens per second from token number `first` on."""
        n_before, start = self.at(first)
        return (self.counts[-1] - n_before) / (self.times[-1] - start)


def simulate(
    scenario: Scenario,
    spec: SpecConfig,
    n_tokens: int,
    pair_statistics: PairStatistics | None = None,
    *,
    start: int = 0,
    n_steps: int = NEVER,
) -> Outcome:
    """Decode a sequence with the policy of `spec`, with empty acceptance statistics unless given.

    start: position where decoding begins; n_steps: number of steps after which it ends.
    """
    text, clock = text_of(scenario, n_tokens), Clock()
    noise = np.random.default_rng((scenario.seed, 1))
    if scenario.draft is None:
        spec = replace(spec, spec_type=tuple(set(spec.spec_type) - {"draft"}))
    drafter, model = drafters_of(scenario, spec, text, clock, noise)
    if pair_statistics is None:
        limit = scenario.max_nodes if spec.num_draft_tokens is None else spec.num_draft_tokens
        pair_statistics = PairStatistics(scenario.planned(), scenario.planned_draft(), limit)
    policy = DraftPolicy(spec, pair_statistics, NEVER, clock=clock)
    context, n = [0, *map(int, text.tokens[1 : 1 + start])], start
    result = Outcome([0.0], [start], [])
    while n < n_tokens and len(result.sizes) < n_steps:
        limits = policy.limits(len(context), NEVER, NEVER)
        (tree,) = trim_together([policy], [drafter.propose(context, limits)])
        is_ahead = should_draft_ahead([policy])
        disturbed = 1.0 + scenario.pass_noise * abs(noise.normal())
        if scenario.stumbles and noise.random() < scenario.stumbles:
            disturbed = STUMBLE
        seconds, stall_seconds = pass_seconds(scenario, len(tree), n, is_ahead)
        clock.now += seconds * disturbed
        acceptance = verify_match(tree, chooser(text, tree, len(context)))
        observe_together([policy], [acceptance], [tree], stall_seconds * disturbed)
        tokens = acceptance.emitted(tree)
        context.extend(tokens)
        n += len(tokens)
        if model is not None:
            model.is_hidden = is_ahead and noise.random() < scenario.hit_rate
            if n >= scenario.change_at and scenario.draft_after is not None:
                model.draft = scenario.draft_after
        result.times.append(clock.now)
        result.counts.append(n)
        result.sizes.append(tree.n_drafted)
    return result


def chooser(text: Text, tree: DraftTree, start: int) -> Callable[[int], int]:
    return lambda node: int(text.tokens[start + tree.depths[node]])


def drafters_of(
    scenario: Scenario, spec: SpecConfig, text: Text, clock: Clock, noise: np.random.Generator
) -> tuple[Drafter, SimulatedDraft | None]:
    drafters: list[Drafter] = []
    model = None
    if scenario.draft is not None and "draft" in spec.drafters:
        model = SimulatedDraft(text, scenario.draft, clock, noise)
        drafters.append(model)
    if scenario.copied_share and "ngram" in spec.drafters:
        drafters.append(SimulatedNgrams(text))
    return (drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)), model


def pass_seconds(
    scenario: Scenario, num_tokens: int, n_done: int, is_ahead: bool
) -> tuple[float, float]:
    """Return the seconds of a pass, and how many of these it waits for weights."""
    cost = scenario.target
    if n_done >= scenario.change_at:
        cost = replace(cost, read_seconds=scenario.slower * cost.read_seconds)
    seconds = cost.seconds(num_tokens)
    stall_seconds = seconds - replace(cost, read_seconds=0.0).seconds(num_tokens)
    slowdown = scenario.slowdown if is_ahead else 1.0
    return slowdown * seconds, slowdown * stall_seconds
