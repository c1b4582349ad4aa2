"""Parallel drafting changes neither output nor proposals, only the time of the work."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import pytest
from alone import own
from exact_rules import table_rows
from generating import RandomDrafter, SteppedAhead, limits_after, make_controller, run
from gguf_models import save_tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from table_backend import TableBackend

from backends.contract.backend import Backend
from backends.hf.backend import TorchBackend
from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.drafters.batched_drafting import run_steps
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.engine.draft_worker import DraftWorker
from specdec.metrics.recorder import StatsRecorder
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler
from specdec.verification.tree import DraftTree

VOCAB, PROMPT, N_TOKENS = 8, [1, 2], 30
TARGET = table_rows(VOCAB, seed=3, concentration=0.3)
LIKE_TARGET = {  # distance of the draft from the target
    share: lambda prefix, share=share: share * TARGET(prefix) + (1 - share) * OTHER(prefix)
    for share in (1.0, 0.7, 0.0)
}
OTHER = table_rows(VOCAB, seed=4, concentration=0.3)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_k=5, seed=6)

SPECS = st.builds(
    lambda nodes, width, depth: SpecConfig(
        num_draft_tokens=nodes, tree_width=width, draft_depth=depth, draft_ahead="on"
    ),
    st.integers(0, 12),
    st.integers(1, VOCAB),
    st.integers(1, 6),
)
LEVELS = st.lists(st.integers(0, 6), min_size=N_TOKENS, max_size=N_TOKENS)


class RoomyTable(TableBackend):
    """A table that refuses more live nodes than it was made for."""

    def __init__(self, rows: Any, max_nodes: int | None) -> None:
        super().__init__(rows, VOCAB)
        self.max_nodes = max_nodes

    def forward(self, batch: Any) -> Any:
        for added in batch:
            assert added.parents is None or len(added.token_ids) <= added.kv.num_free_slots
        return super().forward(batch)


def paths_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {tree.tokens_on_path(i): round(tree.log_probs[i], 6) for i in range(len(tree))}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    share=st.sampled_from([1.0, 0.7, 0.0]),
    params=st.sampled_from([GREEDY, SAMPLED]),
    spec=SPECS,
    levels=LEVELS,
    capacity=st.sampled_from([None, 4, 9, 30]),
    rest=st.sampled_from(["", "ngram", "random"]),
)
def test_the_output_is_plain_decodings(
    share: float,
    params: SamplingParams,
    spec: SpecConfig,
    levels: list[int],
    capacity: Any,
    rest: str,
) -> None:
    plain = run(TableBackend(TARGET, VOCAB), PROMPT, N_TOKENS, params=params)
    draft = RoomyTable(LIKE_TARGET[share], capacity)
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=VOCAB), VOCAB)
    drafter: Any = ModelDrafter(draft, VOCAB, ranker=ranker)
    if rest:
        other = NgramDrafter() if rest == "ngram" else RandomDrafter(VOCAB)
        drafter = MergedDrafter([drafter, other])
    ahead = SteppedAhead(levels)
    target = TableBackend(TARGET, VOCAB)
    assert run(target, PROMPT, N_TOKENS, drafter, params, spec=spec, ahead=ahead) == plain


def test_a_pass_that_runs_alone_ends_the_thread() -> None:
    """The draft's workers would slow the products of the pass."""
    thread = DraftWorker()
    thread.draft_during(lambda: None, lambda: None, lambda should_stop: None, lambda: None)
    assert "specdec-draft" in {thread.name for thread in threading.enumerate()}
    run(TableBackend(TARGET, VOCAB), PROMPT, 2, NgramDrafter(), ahead=thread)
    assert "specdec-draft" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(share=st.sampled_from([1.0, 0.7, 0.0]), spec=SPECS, levels=LEVELS, with_ngram=st.booleans())
def test_a_proposal_is_the_one_that_begins_with_nothing(
    share: float, spec: SpecConfig, levels: list[int], with_ngram: bool
) -> None:
    """Parallel drafting makes the same proposals, only sooner. The table's rows depend on the whole
    prefix, so KV of another sequence would show."""
    rows = LIKE_TARGET[share]
    drafter = ModelDrafter(RoomyTable(rows, None), VOCAB)
    both = MergedDrafter([drafter, NgramDrafter()]) if with_ngram else drafter
    proposals: list[tuple[list[int], TreeLimits, DraftTree]] = []
    propose_in_steps = drafter.propose_in_steps

    def note(context_ids: Any, limits: TreeLimits) -> Any:
        tree = yield from propose_in_steps(context_ids, limits)
        proposals.append((list(context_ids), limits, tree))
        return tree

    drafter.propose_in_steps = note  # type: ignore[method-assign]
    target = TableBackend(TARGET, VOCAB)
    run(target, PROMPT, N_TOKENS, both, spec=spec, ahead=SteppedAhead(levels))
    assert proposals
    for context, limits, tree in proposals:
        new = ModelDrafter(TableBackend(rows, VOCAB), VOCAB).propose(context, limits)
        assert paths_of(tree) == paths_of(new)


# --- hits and misses ------------------------------------------------------------------------


class NotingTable(TableBackend):
    """Record the sequences whose last token is run inside of `drafting_ahead`."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows, VOCAB)
        self.is_ahead = False
        self.run_ahead: set[tuple[int, ...]] = set()

    def logits(self, prefix: Sequence[int]) -> Any:
        if self.is_ahead:
            self.run_ahead.add(tuple(prefix))
        return super().logits(prefix)


class NotingDrafter(ModelDrafter):
    def __init__(self, table: NotingTable) -> None:
        super().__init__(table, VOCAB)
        self.table = table

    def drafting_ahead(self, tree: DraftTree) -> Any:
        self.table.is_ahead = True
        try:
            yield from super().drafting_ahead(tree)
        finally:
            self.table.is_ahead = False


AHEAD = SpecConfig(num_draft_tokens=4, draft_depth=3, draft_ahead="on")


def steps(
    table: NotingTable, n_levels: int, n_steps: int = 12, spec: SpecConfig = AHEAD
) -> tuple[ModelDrafter, list[int], GenerationStats, int]:
    """Return drafter, output and metrics after so many steps, and the number of steps in which the
    draft had run the next root in parallel."""
    drafter, recorder = NotingDrafter(table), StatsRecorder()
    made = make_controller(
        TableBackend(TARGET, VOCAB),
        drafter,
        spec=spec,
        ahead=SteppedAhead(repeat(n_levels)),
        recorder=recorder,
    )
    made.start(PROMPT)
    n_ready = 0
    for _ in range(n_steps):
        made.step(99)
        n_ready += tuple(made.context) in table.run_ahead
    return drafter, made.context, recorder.stats(), n_ready


@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("n_levels", [0, 1, 5])
def test_hits_are_the_outcomes_that_the_draft_had_run(share: float, n_levels: int) -> None:
    _, _, stats, n_ready = steps(NotingTable(LIKE_TARGET[share]), n_levels)
    assert stats.draft_ahead_hits + stats.draft_ahead_misses == 12
    assert stats.draft_ahead_hits == n_ready
    if n_levels == 0:
        assert stats.draft_ahead_hits == 0, "also where `propose` had run the outcome"
    if share < 1.0 and n_levels == 1:
        assert 0 < stats.draft_ahead_hits < 12


def test_a_hit_saves_the_runs_that_were_made_ahead() -> None:
    """A target drafting for itself has nothing left to run after the first step."""
    table, spec = NotingTable(TARGET), dataclasses.replace(AHEAD, tree_width=1)
    drafter, context, _, _ = steps(table, 20, 1, spec)
    table.is_ahead = True  # further runs are recorded, too
    table.run_ahead.clear()
    assert drafter.propose(context, limits_after(context, spec)).n_drafted == 3
    assert table.run_ahead == set()


def test_off_drafts_nothing_ahead() -> None:
    _, _, stats, _ = steps(
        NotingTable(TARGET), 5, spec=dataclasses.replace(AHEAD, draft_ahead="off")
    )
    assert (stats.draft_ahead_hits, stats.draft_ahead_misses) == (0, 0)
    assert stats.overlapped_draft_seconds == 0.0


def test_a_chain_for_the_rejection_rule_is_never_drafted_ahead() -> None:
    sampler = Sampler(SAMPLED, n_tokens=VOCAB)
    rng = np.random.default_rng(0)
    drafter = ModelDrafter(TableBackend(TARGET, VOCAB), VOCAB, chain=(sampler, rng))
    drafter.propose(PROMPT, TreeLimits(4, 4, 1, max_ahead_depth=9))
    assert not drafter.can_draft_ahead


def test_parallel_drafting_leaves_capacity_for_the_next_proposal() -> None:
    backend = RoomyTable(TARGET, 20)
    drafter = ModelDrafter(backend, VOCAB)
    drafter.propose(PROMPT, TreeLimits(3, 2, 4, max_ahead_depth=50))
    run_steps(drafter.drafting_ahead(DraftTree(PROMPT[-1])))
    assert len(drafter._kv.table) == 20 - 3


def test_parallel_drafting_is_no_deeper_than_the_sequence_may_grow() -> None:
    backend = TableBackend(TARGET, VOCAB)
    drafter = ModelDrafter(backend, VOCAB)
    drafter.propose(PROMPT, TreeLimits(3, 2, VOCAB, max_ahead_depth=3))
    run_steps(drafter.drafting_ahead(DraftTree(PROMPT[-1])))
    assert drafter._kv.table.max_depth == 2, "of the last level no node is run"


def test_an_unlikely_level_is_not_run() -> None:
    drafter = ModelDrafter(TableBackend(TARGET, VOCAB), VOCAB)
    everything = drafter.propose(PROMPT, TreeLimits(400, 6, 2))
    drafter.reset()
    less = drafter.propose(PROMPT, TreeLimits(400, 6, 2, min_level_probability=0.5))
    assert 0 < less.n_drafted < everything.n_drafted
    drafter.reset()
    nothing = drafter.propose(PROMPT, TreeLimits(400, 6, 2, min_level_probability=1.1))
    assert nothing.n_drafted == 0, "not even the root is worth a run"


# --- real models: no KV of another sequence -------------------------------------------------------


@pytest.fixture(scope="module", params=["torch", pytest.param("gguf", marks=pytest.mark.gguf)])
def models(request: Any, tmp_path_factory: Any, checkpoint_factory: Any) -> Iterator[Any]:
    """A target, a draft that is often right, and the draft once more."""
    if request.param == "torch":
        same = checkpoint_factory("llama")
        with (
            TorchBackend.resident(same) as target,
            TorchBackend.resident(same) as draft,
            TorchBackend.resident(same) as fresh,
        ):
            yield target, draft, fresh
        return
    from backends.gguf.model import load_gguf_model
    from backends.llama.backend import LlamaBackend

    path = save_tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "m.gguf")
    size = {"max_context": 256, "max_nodes": 128}
    with (
        LlamaBackend(load_gguf_model(path), load_mode="ram", **size) as target,
        LlamaBackend(load_gguf_model(path), load_mode="ram", **size) as draft,
        LlamaBackend(load_gguf_model(path), load_mode="ram", **size) as fresh,
    ):
        yield target, draft, fresh


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    ("params", "is_blind"),
    [(GREEDY, False), (SamplingParams(temperature=0.9, seed=1), False)]
    + [(SamplingParams(temperature=2.0, seed=1), True)],
    ids=["greedy", "coupled", "blind"],
)
def test_drafts_from_cached_kv_are_those_of_a_new_cache(
    models: tuple[Backend, Backend, Backend], params: SamplingParams, is_blind: bool
) -> None:
    """After hits and misses every candidate is as likely as from a fresh prefill."""
    target, draft, fresh = models
    spec = SpecConfig(num_draft_tokens=5, tree_width=3, draft_depth=3, draft_ahead="on")
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=96), 96)
    if is_blind:
        ranker = CandidateRanker(96)
    drafter = ModelDrafter(draft, 96, ranker=ranker)
    own(target).rollback(0)
    drafter.reset()
    recorder, ahead = StatsRecorder(), SteppedAhead(repeat(2))
    made = make_controller(target, drafter, params, spec=spec, ahead=ahead, recorder=recorder)
    made.start([5, 17, 60, 33, 8])
    for _ in range(8):
        context = list(made.context)
        tree = made.step(99).tree
        for node in {1, len(tree) // 2, len(tree) - 1}:
            above = context + list(tree.tokens_on_path(tree.parents[node]))
            own(fresh).rollback(0)
            (candidates,) = ranker.rank(own(fresh).prefill(above)[None], [len(above)], 3)
            expected = dict(candidates)[tree.token_ids[node]]
            assert tree.log_probs[node] == pytest.approx(expected, abs=4e-3)
    stats = recorder.stats()
    assert (stats.draft_ahead_misses if is_blind else stats.draft_ahead_hits) > 0
