"""One tree from several proposals: merged node by node, within the limits, sources recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from exact_rules import table_rows
from generating import make_controller
from hypothesis import given, settings
from hypothesis import strategies as st
from table_backend import TableBackend

from specdec.config import SpecConfig
from specdec.drafters import Drafter, MergedDrafter, NgramDrafter, TreeLimits
from specdec.drafters.merged import merge_trees, narrowed
from specdec.drafters.model import ModelDrafter
from specdec.metrics.recorder import StatsRecorder
from specdec.sampling.params import SamplingParams
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

LIMITS = TreeLimits(max_nodes=32, max_depth=8, width=4)
CHAIN = TreeLimits(max_nodes=8, max_depth=8, width=1)


def branches(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens from below the root to every leaf."""
    return {tree.tokens_on_path(i) for i in range(1, len(tree)) if not tree.children(i)}


def by_tokens(tree: DraftTree) -> dict[tuple[int, ...], int]:
    """Return a map from tokens below the root to nodes."""
    return {tree.tokens_on_path(i): i for i in range(1, len(tree))}


@st.composite
def trees(draw: st.DrawFn, source: str) -> DraftTree:
    tree = DraftTree(9)
    for _ in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(0, len(tree) - 1))
        log_prob = math.log(draw(st.sampled_from([0.9, 0.5, 0.3, 0.1])))
        tree.add(parent, draw(st.integers(0, 4)), log_prob, source)
    return tree


@settings(deadline=None)
@given(trees("draft"), trees("ngram"))
def test_every_node_is_there_once_with_all_who_proposed_it(a: DraftTree, b: DraftTree) -> None:
    merged = merge_trees([a, b])
    actual, of_a, of_b = by_tokens(merged), by_tokens(a), by_tokens(b)
    assert set(actual) == set(of_a) | set(of_b)
    assert len(actual) == merged.n_drafted
    for tokens, node in actual.items():
        owners = [
            (item, nodes[tokens]) for item, nodes in ((a, of_a), (b, of_b)) if tokens in nodes
        ]
        assert merged.sources[node] == tuple(tree.sources[i][0] for tree, i in owners)
        assert merged.log_probs[node] == max(tree.log_probs[i] for tree, i in owners)
        path = merged.path(node)
        assert merged.path_log_probs[node] == pytest.approx(sum(merged.log_probs[i] for i in path))


class Proposing(Drafter):
    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        return self.tree


def test_the_first_drafter_knows_what_the_others_propose() -> None:
    seen = []

    class Listening(Proposing):
        def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
            seen.append(limits.known)
            return super().propose(context_ids, limits)

    trees = [DraftTree(9) for _ in range(3)]
    for token, tree in enumerate(trees):
        tree.add(ROOT, token, -1.0, f"source {token}")
    merged = MergedDrafter([Listening(tree) for tree in trees]).propose([9], LIMITS)
    last, middle, first = seen
    assert last is None
    assert middle.token_ids == [9, 2]
    assert set(first.token_ids) == {9, 1, 2}
    assert merged.token_ids == [9, 0, 1, 2]


@settings(deadline=None)
@given(trees("draft"), trees("ngram"), st.integers(1, 3), st.integers(0, 9))
def test_limits_hold_for_the_union(a: DraftTree, b: DraftTree, width: int, n: int) -> None:
    """Keep the most probable children of each node, and of these the most probable nodes."""
    limits = TreeLimits(n, 8, width)
    tree = MergedDrafter([Proposing(a), Proposing(b)]).propose([9], limits)
    union = merge_trees([a, b])
    of_union = by_tokens(union)
    assert tree.n_drafted == min(n, narrowed(union, width).n_drafted)
    for tokens, node in by_tokens(tree).items():
        whole = of_union[tokens]
        assert tree.sources[node] == union.sources[whole]
        assert tree.log_probs[node] == union.log_probs[whole]
        siblings = union.children(union.parents[whole]).values()
        better = [i for i in siblings if union.log_probs[i] > union.log_probs[whole]]
        assert len(better) < width
    assert all(len(tree.children(i)) <= width for i in range(len(tree)))


class Noting(Drafter):
    """Record the last proposal of another drafter."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.last = DraftTree(0)

    def propose(self, context_ids: Sequence[int], limits: TreeLimits) -> DraftTree:
        self.last = self.inner.propose(context_ids, limits)
        return self.last

    def observe(self, acceptance: Acceptance, tree: DraftTree) -> None:
        self.inner.observe(acceptance, tree)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("n_nodes", "width", "depth"), [(12, 3, 5), (3, 2, 5), (4, 1, 4), (1, 1, 1)]
)
def test_ngram_hits_are_the_accepted_tokens_that_the_ngram_proposed(
    n_nodes: int, width: int, depth: int, temperature: float
) -> None:
    """Recounted from the n-gram drafter's own proposals, whoever else proposed the same."""
    vocab, n_tokens, prompt = 3, 120, [1, 2, 0, 1, 2]
    rows = table_rows(vocab, seed=5, concentration=0.3)
    periodic = lambda prefix: rows(tuple(prefix[-2:]))  # noqa: E731
    params = SamplingParams(temperature=temperature, seed=1)
    spec = SpecConfig(num_draft_tokens=n_nodes, tree_width=width, draft_depth=depth)
    recorder = StatsRecorder()
    model = Noting(ModelDrafter(TableBackend(table_rows(vocab, seed=6), vocab), vocab))
    ngram = Noting(NgramDrafter())
    controller = make_controller(
        TableBackend(periodic, vocab),
        MergedDrafter([model, ngram]),
        params,
        spec=spec,
        recorder=recorder,
    )
    controller.start(prompt)
    n_hits = n_both = n_alone = 0
    while len(controller.context) < n_tokens:
        tree, acceptance, _ = controller.step(n_tokens - len(controller.context))
        for node in acceptance.path[1:]:
            is_hit = tree.tokens_on_path(node) in by_tokens(ngram.last)
            n_hits += is_hit
            is_drafted = tree.tokens_on_path(node) in by_tokens(model.last)
            assert is_hit or is_drafted
            n_both += is_hit and is_drafted
            n_alone += is_hit and not is_drafted
    assert recorder.stats().ngram_hits == n_hits
    assert n_hits > 0
    if n_nodes == 12:
        assert n_both > 0
        assert n_alone > 0


def test_a_cut_step_counts_the_hits_that_reached_the_caller() -> None:
    recorder, tree, node = StatsRecorder(), DraftTree(0), 0
    for token, source in ((1, "ngram"), (2, "draft"), (3, ("draft", "ngram")), (4, "ngram")):
        node = tree.add(node, token, -0.1, source)
    recorder.record_first_token()
    recorder.record_step(tree, Acceptance((0, 1, 2, 3, 4), 9, is_bonus=True), n_emitted=3)
    assert recorder.stats().ngram_hits == 2
    recorder.record_step(tree, Acceptance((0, 1, 2, 3, 4), 9, is_bonus=True))
    assert recorder.stats().ngram_hits == 2 + 3


def test_a_drawn_chain_is_not_merged() -> None:
    drawn = DraftTree(9)
    drawn.add(0, 1, -0.1, draft_probs=np.array([0.1, 0.9]))
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_trees([DraftTree(9), drawn])


class FixedDrafter(Drafter):
    def __init__(self, *chains: tuple[int, ...], source: str = "draft", log_prob: float = -0.5):
        self.chains, self.source, self.log_prob = chains, source, log_prob
        self.observed: list[Acceptance] = []
        self.n_reset = 0

    def propose(self, context_ids, limits):
        tree = DraftTree(context_ids[-1])
        for chain in self.chains:
            node = 0
            for token in chain[: limits.max_depth]:
                node = tree.add(node, token, self.log_prob, self.source)
        return tree

    def observe(self, acceptance, tree):
        self.observed.append(acceptance)

    def reset(self):
        self.n_reset += 1


def test_merged_tree_holds_both_and_keeps_the_larger_probability() -> None:
    a = FixedDrafter((1, 2), (3,), log_prob=-0.5)
    b = FixedDrafter((1, 4), source="ngram", log_prob=-0.2)
    tree = MergedDrafter([a, b]).propose([9], LIMITS)
    assert branches(tree) == {(1, 2), (1, 4), (3,)}
    assert tree.log_probs[tree.children(0)[1]] == -0.2
    assert tree.sources[tree.children(0)[1]] == ("draft", "ngram")


def test_merged_tree_is_cut_to_the_most_probable_nodes() -> None:
    a = FixedDrafter((1, 2, 3), log_prob=-0.5)
    b = FixedDrafter((4,), (5,), log_prob=-0.6)
    tree = MergedDrafter([a, b]).propose([9], TreeLimits(2, 8, 4))
    assert branches(tree) == {(1,), (4,)}


def test_a_merged_chain_is_the_likeliest_path() -> None:
    empty, full = FixedDrafter(), FixedDrafter((1, 2))
    likelier = FixedDrafter((3, 4), source="ngram", log_prob=-0.1)
    tree = MergedDrafter([empty, full, likelier]).propose([9], CHAIN)
    assert branches(tree) == {(3, 4)}
    assert MergedDrafter([empty, full]).propose([9], CHAIN).n_drafted == 2
    assert MergedDrafter([empty]).propose([9], CHAIN).n_drafted == 0


def test_merged_drafter_tells_everyone() -> None:
    drafters = [FixedDrafter((1,)), FixedDrafter((2,))]
    merged = MergedDrafter(drafters)
    tree = merged.propose([9], LIMITS)
    merged.observe(Acceptance((0,), 7, is_bonus=False), tree)
    merged.reset()
    assert [(len(d.observed), d.n_reset) for d in drafters] == [(1, 1)] * 2


def test_misuse_is_an_error() -> None:
    with pytest.raises(ValueError, match="different root"):
        merge_trees([DraftTree(1), DraftTree(2)])
    with pytest.raises(ValueError, match="at least one"):
        MergedDrafter([])
