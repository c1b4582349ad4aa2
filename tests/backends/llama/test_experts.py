"""A GGUF mixture reads the experts that rows are routed to, and equals one in memory."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from alone import own
from weight_files import FaultyReads

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from functools import partial

from gguf_streaming import PROMPT, exercise, in_memory, same, streamed_experts

import specdec
from backends.contract.backend import PREFIX, UnsupportedModel
from backends.contract.exactness import Exactness
from backends.contract.source import BackendOptions
from backends.ggml.library import LlamaError, LlamaModel
from backends.llama.context import PREFILL_TOKENS
from backends.llama.graph import RoutedNodes
from backends.llama.passes import PassCancelled
from backends.llama.source import GgufSource
from offload.experts.eviction import visits_of
from offload.paging.experts import PagedExperts
from offload.placement.experts import slot_bytes
from offload.storage.direct_io import StorageError
from offload.trace import recording
from specdec.planning.memory.placement_planner import CpuPlacementPlanner

pytestmark = pytest.mark.gguf
SHAPE = {"n_layers": 3, "n_experts": 8, "feed_forward": 256}


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("n_slots", [0, 2])
@pytest.mark.parametrize(
    ("family", "dtype"), [("mixtral", "Q4_0"), ("qwen3moe", "Q8_0"), ("qwen3moe", "Q4_K")]
)
def test_bit_equal_to_the_model_in_memory(family, dtype, n_slots, models, paging):
    model = models(family, dtype=dtype, hidden=256, **SHAPE)
    with in_memory(model) as expected, streamed_experts(model, n_slots=n_slots) as actual:
        assert same(exercise(actual), exercise(expected))


def test_a_prompt_of_several_passes(models, paging):
    """In all passes but the last one, the last layer has no rows."""
    n_tokens = PREFILL_TOKENS + 20
    model = models("qwen3moe", n_ctx=n_tokens, **SHAPE)
    prompt = [i % 64 for i in range(n_tokens)]
    with (
        in_memory(model, max_context=n_tokens) as expected,
        streamed_experts(model, max_context=n_tokens) as actual,
    ):
        assert same([own(actual).prefill(prompt)], [own(expected).prefill(prompt)])


def test_of_split_files_too(models, paging):
    model = models("qwen3moe", n_splits=3, **SHAPE)
    with in_memory(model) as expected, streamed_experts(model) as actual:
        assert same(exercise(actual), exercise(expected))


def test_a_pass_asks_for_the_experts_of_its_rows(models, paging):
    model = models("qwen3moe", **SHAPE)
    with streamed_experts(model) as backend:
        with recording() as trace:
            own(backend).prefill(PROMPT)
        asked = visits_of(trace)
        assert [layer for layer, _ in asked] == [0, 1, 2]
        counts = [len(experts) for _, experts in asked]
        assert min(counts[:-1]) > 2 <= max(counts) <= 8  # the last layer has one row
        with recording() as trace:
            own(backend).extend([7], [PREFIX])
        first = visits_of(trace)
        assert [len(experts) for _, experts in first] == [2] * 3
        before = backend.transfer_stats
        assert before.experts_asked == sum(counts) + 6
        own(backend).rollback(len(PROMPT))
        with recording() as trace:
            own(backend).extend([7], [PREFIX])
        assert visits_of(trace) == first
        after = backend.transfer_stats  # all of them are in memory
        assert after.bytes_streamed == before.bytes_streamed
        assert after.experts_found == before.experts_found + 6


@pytest.mark.parametrize("rows", [[], [0], [0, 1]])
def test_nothing_is_read_for_padding_rows(rows, models, paging):
    model = models("qwen3moe", **SHAPE)
    asked = []
    for min_count in (1, 4):
        exact = Exactness(True, min_batch_tokens=min_count)
        with streamed_experts(model, exactness=exact, cache_type_k="bf16") as backend:
            own(backend).prefill(PROMPT)
            with recording() as trace:
                own(backend).extend([7, 9], [PREFIX, PREFIX], logits_at=rows)
            asked.append(visits_of(trace))
    assert asked[0][:-1] == asked[1][:-1]  # the last layer computes only rows with logits
    assert len(asked[1][-1][1]) <= 4


def test_experts_are_prefetched_for_a_prompt_alone(models, paging, monkeypatch):
    """Neither padding rows nor a prompt's last layer, which has one row, ask for all experts."""
    prefetch, layers = PagedExperts.prefetch, []

    def noted(self, layer, *args):
        layers.append(layer)
        prefetch(self, layer, *args)

    monkeypatch.setattr(PagedExperts, "prefetch", noted)
    exact = Exactness(True, min_batch_tokens=8)
    model = models("qwen3moe", **SHAPE)
    with streamed_experts(model, exactness=exact, cache_type_k="bf16") as backend:
        own(backend).prefill(PROMPT)
        assert layers == [0, 1]
        own(backend).extend([7], [PREFIX])
        assert layers == [0, 1]


@pytest.mark.slow
def test_the_more_memory_the_less_is_read(models, paging):
    model = models("qwen3moe", **SHAPE)
    n_read = []
    for share in (0.3, 0.6, 0.95):
        n_bytes = int(share * sum(x.n_bytes for x in model.experts))
        with streamed_experts(model, n_bytes) as backend:
            exercise(backend)
            n_read.append(backend.transfer_stats.bytes_streamed)
    assert all(more > less for more, less in pairwise(n_read))


@pytest.mark.slow
def test_a_failing_read_surfaces_and_the_next_pass_is_right(models, paging, monkeypatch):
    model = models("qwen3moe", **SHAPE)
    with in_memory(model) as expected:
        requested = exercise(expected)
    armed = threading.Event()

    def fault(call, length):
        if armed.is_set():
            raise OSError(5, "Input/output error")

    faulty = partial(PagedExperts, storage=FaultyReads(fault).storage)
    monkeypatch.setattr("backends.llama.stream.PagedExperts", faulty)
    with streamed_experts(model) as backend:
        for _ in range(2):
            armed.set()
            with pytest.raises(StorageError, match="Input/output error"):
                own(backend).prefill(PROMPT)
            armed.clear()
            assert own(backend).n_committed == 0
            assert same(exercise(backend), requested)
            own(backend).rollback(0)


@pytest.mark.slow
def test_a_cancelled_pass_ends_while_its_reads_hang_and_the_next_is_right(
    models, paging, monkeypatch
):
    model = models("qwen3moe", **SHAPE)
    with in_memory(model) as expected:
        requested = exercise(expected)
    let_go, opened = threading.Event(), []

    def hang(call, length):
        if opened and not let_go.is_set():
            opened[0].request_cancel()
            let_go.wait(30)

    hanging = partial(PagedExperts, storage=FaultyReads(hang).storage)
    monkeypatch.setattr("backends.llama.stream.PagedExperts", hanging)
    with streamed_experts(model) as backend:
        opened.append(backend)
        try:
            with pytest.raises(PassCancelled):
                own(backend).prefill(PROMPT)
            assert not let_go.is_set()
        finally:
            let_go.set()
        assert own(backend).n_committed == 0
        assert same(exercise(backend), requested)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_model_whose_reads_hang_is_left_open(hangs, models, paging, monkeypatch):
    """llama.cpp would unmap pages that pending reads still write to."""
    closed, close = [], LlamaModel.close
    monkeypatch.setattr(LlamaModel, "close", lambda own: (closed.append(own), close(own)))
    monkeypatch.setattr("offload.experts.readers.JOIN_SECONDS", 0.01)
    backend, let_go = streamed_experts(models("qwen3moe", **SHAPE)), threading.Event()
    if not hangs:
        let_go.set()
    read = backend._stream._experts._readers._pool.submit(let_go.wait)
    backend._stream._experts._readers._begun.add(read)
    try:
        backend.close()
        assert (backend._model in closed) is not hangs
    finally:
        let_go.set()
        read.result()
        close(backend._model)


def test_experts_that_are_chosen_otherwise_are_refused():
    routed = RoutedNodes()
    with pytest.raises(UnsupportedModel, match="experts of layer 3 in a way"):
        routed.see(1, 3, is_by_expert=False)
    with pytest.raises(UnsupportedModel, match="experts of layer 3 0 times"):
        RoutedNodes().routers([3])


def test_experts_that_the_model_does_not_have_are_refused(models, paging, monkeypatch):
    wrong = np.full((len(PROMPT), 2), SHAPE["n_experts"], np.int32)
    monkeypatch.setattr("backends.llama.stream.chosen_experts", lambda _: wrong)
    with (
        streamed_experts(models("qwen3moe", **SHAPE)) as backend,
        pytest.raises(LlamaError, match="chose experts 8 to 8 of the 8 of layer 0"),
    ):
        own(backend).prefill(PROMPT)


def test_a_plan_holds_what_is_no_expert_and_gives_the_rest_to_experts(models):
    model = models("qwen3moe", **SHAPE)
    source = GgufSource(model.path, BackendOptions())
    names = {record.name for layer in source.layers for record in layer.tensors}
    assert not any("_exps" in name for name in names)
    placement_planner = CpuPlacementPlanner(source, "auto")
    placement = placement_planner.place(
        placement_planner.all_bytes - 9 * slot_bytes(source.experts), 0
    )
    assert placement.n_streamed_layers == 0
    assert 8 <= placement.experts.n_slots < 15
    minimum = placement_planner.place(placement_planner.min_bytes(0), 0)
    assert minimum.experts.n_slots >= 8


@pytest.mark.slow
def test_outputs_are_those_of_the_model_in_memory(models, monkeypatch):
    """With speculation, with scarce memory, and with sequences that share passes."""
    path = models("qwen3moe", hidden=256, **SHAPE).path
    load = partial(specdec.load, path, ctx_size=64, parallel=3, spec_type="ngram")
    prompts = [PROMPT, PROMPT[::-1], PROMPT[:7]]
    options = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
    with load(load_mode="mmap") as llm:
        expected = [llm.generate(prompt, **options).token_ids for prompt in prompts]
    place = CpuPlacementPlanner.place

    def with_little(placement_planner, n_bytes, device_bytes):
        n_missing = 9 * slot_bytes(placement_planner.source.experts)
        return place(placement_planner, placement_planner.all_bytes - n_missing, device_bytes)

    monkeypatch.setattr(CpuPlacementPlanner, "place", with_little)
    with load() as llm:
        experts = llm.plan.placement.experts
        assert experts.n_slots < experts.n_experts
        assert any("experts in memory" in line for line in llm.plan.lines())
        actual = llm.generate(PROMPT, **options)
        together = llm.generate(prompts, **options)
    assert actual.token_ids == expected[0]
    assert actual.stats.bytes_streamed > 0
    assert [item.token_ids for item in together] == expected
