"""A streamed GGUF model computes exactly what the same model in memory does."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from gguf_models import FAMILIES, save_tiny_gguf
from weight_files import FaultyReads

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import backends.llama_graph
import backends.llama_stream
from backends.base import PREFIX, ContextFull, UnsupportedModel
from backends.gguf_model import load_gguf_model
from backends.llama_cpp import LlamaBackend
from backends.llama_graph import make_schedule
from backends.llama_lib import LlamaError
from backends.llama_passes import PassCancelled
from backends.llama_stream import _QUICK_HANDOVER, resident_outer_records
from offload.direct_io import StorageError
from offload.pager import Pager
from offload.plan import LayerWeights, ResidencyPlan

pytestmark = pytest.mark.gguf

PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
TREE_TOKENS = [7, 20, 30, 21, 22, 31, 40]
TREE_PARENTS = [-1, 0, 0, 1, 3, 2, 3]
OPTIONS = {"max_context": 60, "max_nodes": 20, "n_threads": 2}


def residency(layers, n_slots=2):
    return ResidencyPlan(tuple(layers), n_slots, 0, 0, 0, 0, 0)


def bare(model):
    return model.layers


def one_role(model):
    """The down projections of all layers stay."""
    return [pinned(layer, lambda name: "ffn_down" in name) for layer in model.layers]


def first_and_last_layer(model):
    last = len(model.layers) - 1
    return [
        pinned(layer, lambda name, keep=i in (0, last): keep)
        for i, layer in enumerate(model.layers)
    ]


def all_but_one_layer(model):
    return [pinned(layer, lambda name, keep=i != 1: keep) for i, layer in enumerate(model.layers)]


def norms(model):
    return [pinned(layer, lambda name: "norm" in name) for layer in model.layers]


PLANS = [bare, one_role, first_and_last_layer, all_but_one_layer, norms]


def pinned(layer, choose):
    return layer.with_resident(frozenset(r.name for r in layer.tensors if choose(r.name)))


def in_memory(model, **options):
    return LlamaBackend(model, load_mode="mmap", **{**OPTIONS, **options})


def streamed(model, layers=None, n_slots=2, **options):
    plan = residency(layers or model.layers, n_slots)
    return LlamaBackend(model, residency=plan, **{**OPTIONS, **options})


def exercise(backend):
    """The logits of two rounds with trees, chains, commits, prunes and rollbacks."""
    found = []
    for _ in range(2):
        found.append(backend.prefill(PROMPT))
        first = backend.next_node_id
        parents = [PREFIX if p == -1 else first + p for p in TREE_PARENTS]
        found.append(backend.extend(TREE_TOKENS, parents)[1])
        backend.commit([first, first + 1, first + 3], keep=[first + 6])
        found.append(backend.extend([50, 51], [first + 6, PREFIX], rows=[1])[1])
        backend.prune([first + 6])
        found.append(backend.extend([9], [PREFIX])[1])
        backend.rollback(7)
    return found


def keep_extending(backend):
    for _ in range(5):
        backend.extend([7, 8], [PREFIX] * 2)
        backend.rollback(len(PROMPT))


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(family, **options) -> GgufModel, written once."""
    made = {}

    def make(family, **options):
        key = (family, repr(sorted(options.items())))
        if key not in made:
            path = tmp_path_factory.mktemp("gguf") / "m.gguf"
            made[key] = load_gguf_model(save_tiny_gguf(family, path, **options))
        return made[key]

    return make


@pytest.fixture
def paging(monkeypatch):
    """paging(**options): options for the pagers made from now on; slots are poisoned anyway."""

    def change(**options):
        pager = partial(Pager, poison=True, **options)
        monkeypatch.setattr(backends.llama_stream, "Pager", pager)

    change()
    return change


@pytest.mark.parametrize("dtype", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bit_equal_to_the_model_in_memory(family, dtype, models, paging):
    model = models(family, dtype=dtype)
    with in_memory(model) as expected, streamed(model) as found:
        assert same(exercise(found), exercise(expected))


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("n_splits", [1, 3])
def test_bit_equal_with_resident_tensors(n_splits, plan, n_slots, models, paging):
    model = models("llama", n_layers=5, n_splits=n_splits, dtype="Q8_0")
    with in_memory(model) as expected, streamed(model, plan(model), n_slots) as found:
        assert same(exercise(found), exercise(expected))


def test_layers_larger_than_huge_pages(models, paging):
    """Layers of several MiB move as huge pages and edges."""
    model = models("llama", n_layers=4, hidden=512, feed_forward=1792, dtype="F16")
    with in_memory(model) as expected, streamed(model, n_slots=3) as found:
        assert same(exercise(found), exercise(expected))


def test_a_pass_reads_every_streamed_layer_once(models, paging):
    model = models("llama", n_layers=6)
    with streamed(model) as backend:
        backend.prefill(PROMPT)
        before = backend.stream_use.bytes_streamed
        for _ in range(10):
            backend.extend([5], [PREFIX])
        one_pass = sum(layer.slot_bytes for layer in model.layers)
        read = backend.stream_use.bytes_streamed - before
        # Two slots are read ahead at either end.
        assert 9 * one_pass < read < 11 * one_pass


def test_target_and_draft_from_the_same_file(models, paging):
    model = models("llama")
    with streamed(model) as a, streamed(model) as b, in_memory(model) as expected:
        wanted = exercise(expected)
        assert same(exercise(a), wanted)
        assert same(exercise(b), wanted)


def test_a_prompt_longer_than_a_batch(models, paging, monkeypatch):
    model = models("llama")
    with streamed(model) as whole:
        expected = whole.prefill(PROMPT)
    monkeypatch.setattr("backends.llama_context.PREFILL_ROWS", 5)
    with streamed(model, max_nodes=3) as chunked:
        assert chunked.max_rows == 5
        assert np.abs(chunked.prefill(PROMPT) - expected).max() < 1e-2
        assert chunked.n_committed == len(PROMPT)
        with pytest.raises(ContextFull):
            chunked.prefill(PROMPT * 5)
        assert chunked.n_committed == len(PROMPT)


def test_every_failing_read_surfaces_and_the_next_pass_is_right(models, paging):
    model = models("llama", n_layers=4)
    with in_memory(model) as expected:
        expected.prefill(PROMPT)
        ids, first = expected.extend([7, 8], [PREFIX] * 2)
    armed = threading.Event()

    def fault(call, length):
        if armed.is_set():
            armed.clear()
            raise OSError(5, "Input/output error")

    paging(storage=FaultyReads(fault).storage)
    with streamed(model) as backend:
        backend.prefill(PROMPT)
        for _ in range(8):
            armed.set()
            with pytest.raises(StorageError, match="Input/output error"):
                keep_extending(backend)  # what was read ahead may suffice for one more pass
            assert not armed.is_set()
            assert backend.n_committed == len(PROMPT)
            assert np.array_equal(backend.extend([7, 8], [PREFIX] * 2)[1], first)
            backend.rollback(len(PROMPT))


class SlowStorage:
    """Reads that wait while `slow` is set, and say when one has begun."""

    def __init__(self):
        self.slow, self.has_begun = threading.Event(), threading.Event()
        self.storage = FaultyReads(self.wait).storage

    def wait(self, call, length):
        if self.slow.is_set():
            self.has_begun.set()
            time.sleep(0.02)


@pytest.mark.parametrize("how", ["ctrl-c", "request"])
def test_cancel_in_the_middle_of_a_pass(how, models, paging):
    model = models("llama", n_layers=40)
    disk = SlowStorage()
    paging(storage=disk.storage)
    with in_memory(model) as reference:
        expected = exercise(reference)
    with streamed(model) as backend:
        backend.prefill(PROMPT)
        disk.slow.set()

        def interrupt():
            disk.has_begun.wait(10)
            if how == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
            while how == "request" and not was_ended.wait(0.001):
                backend.request_cancel()

        was_ended = threading.Event()
        thread = threading.Thread(target=interrupt)
        thread.start()
        before = backend.stream_use.bytes_streamed
        with pytest.raises(KeyboardInterrupt if how == "ctrl-c" else PassCancelled):
            keep_extending(backend)
        was_ended.set()
        thread.join()
        disk.slow.clear()
        one_pass = sum(layer.slot_bytes for layer in model.layers)
        assert backend.stream_use.bytes_streamed - before < 2 * one_pass
        assert backend.n_committed == len(PROMPT)
        backend.rollback(0)
        assert same(exercise(backend), expected)


def test_a_layer_that_is_read_too_early_is_refused(models):
    layers = models("llama", n_layers=2).layers
    nodes = [frozenset(), frozenset({0}), frozenset({1}), frozenset({0}), frozenset()]
    with pytest.raises(UnsupportedModel, match="reads layer 1 before"):
        make_schedule(nodes, layers)
    with pytest.raises(UnsupportedModel, match="does not read layer 1"):
        make_schedule(nodes[:2], layers)
    with pytest.raises(UnsupportedModel, match="reads layer 0 before"):
        make_schedule([frozenset({0}), frozenset({1})], layers)
    schedule = make_schedule([*nodes[:2], *nodes[1:3], frozenset()], layers)
    assert schedule.ends == {2: 0, 3: 1}
    assert schedule.n_nodes == 5
    kept = [pinned(layers[0], lambda name: True), LayerWeights(layers[1].tensors)]
    assert make_schedule(nodes, kept).ends == {2: 1}


def test_a_graph_in_several_parts_is_refused(models, monkeypatch):
    log = ["sched_reserve: graph: nodes = 99, splits = 3, input objects = 4"]
    with pytest.raises(LlamaError, match="divides the graph into 3 parts"):
        backends.llama_stream._check_one_split(log)
    with pytest.raises(LlamaError, match="an unknown number of parts"):
        backends.llama_stream._check_one_split([])


def test_another_layout_of_ggml_tensor_is_noticed(models, paging, monkeypatch):
    fields = [field for field in backends.llama_graph.Tensor._fields_ if field[0] != "view_offs"]
    other = type("Other", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setattr(backends.llama_graph, "Tensor", other)
    with pytest.raises(LlamaError, match="lays out ggml_tensor in another way"):
        streamed(models("llama"))


def test_the_head_is_resident_and_an_embedding_alone_is_not(models):
    def names(family):
        return {record.name for record in resident_outer_records(models(family))}

    assert names("llama") == {"output.weight", "output_norm.weight"}
    assert names("gemma") == {"token_embd.weight", "output_norm.weight"}


def test_close_is_idempotent_and_ends_the_readers(models, paging):
    before = threading.active_count()
    backend = streamed(models("llama"))
    backend.prefill(PROMPT)
    backend.close()
    backend.close()
    assert threading.active_count() == before


def test_passes_of_two_models_at_once_put_the_switch_interval_back() -> None:
    """Whichever ends first."""
    before = sys.getswitchinterval()
    first, second = ExitStack(), ExitStack()
    first.enter_context(_QUICK_HANDOVER)
    second.enter_context(_QUICK_HANDOVER)
    assert sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before
