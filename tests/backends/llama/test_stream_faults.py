"""Streamed GGUF models: failing reads, cancelled passes, graphs that are refused, the end."""

import ctypes
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from alone import own
from weight_files import FaultyReads

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from gguf_streaming import PROMPT, exercise, in_memory, pinned, same, streamed

import backends.llama.graph
from backends.contract.backend import PREFIX, UnsupportedModel
from backends.ggml.library import LlamaError
from backends.llama.graph import check_one_split, make_schedule
from backends.llama.passes import QUICK_HANDOVER, PassCancelled
from offload.placement.placement import LayerWeights
from offload.storage.direct_io import StorageError

pytestmark = pytest.mark.gguf


def keep_extending(backend):
    for _ in range(5):
        own(backend).extend([7, 8], [PREFIX] * 2)
        own(backend).rollback(len(PROMPT))


def test_every_failing_read_surfaces_and_the_next_pass_is_right(models, paging):
    model = models("llama", n_layers=4)
    with in_memory(model) as expected:
        own(expected).prefill(PROMPT)
        ids, first = own(expected).extend([7, 8], [PREFIX] * 2)
    armed = threading.Event()

    def fault(call, length):
        if armed.is_set():
            armed.clear()
            raise OSError(5, "Input/output error")

    paging(storage=FaultyReads(fault).storage)
    with streamed(model) as backend:
        own(backend).prefill(PROMPT)
        for _ in range(8):
            armed.set()
            with pytest.raises(StorageError, match="Input/output error"):
                keep_extending(backend)  # the read-ahead may suffice for one more pass
            assert not armed.is_set()
            assert own(backend).n_committed == len(PROMPT)
            assert np.array_equal(own(backend).extend([7, 8], [PREFIX] * 2)[1], first)
            own(backend).rollback(len(PROMPT))


class SlowStorage:
    """Storage whose reads wait while `slow` is set, and signal that one has begun."""

    def __init__(self):
        self.slow, self.has_begun = threading.Event(), threading.Event()
        self.storage = FaultyReads(self.wait).storage

    def wait(self, call, length):
        if self.slow.is_set():
            self.has_begun.set()
            time.sleep(0.02)


def test_cancel_in_the_middle_of_a_pass(models, paging):
    model = models("llama", n_layers=40)
    disk = SlowStorage()
    paging(storage=disk.storage)
    with in_memory(model) as reference:
        expected = exercise(reference)
    with streamed(model) as backend:
        own(backend).prefill(PROMPT)
        disk.slow.set()

        def interrupt():
            disk.has_begun.wait(10)
            while not was_ended.wait(0.001):
                backend.request_cancel()

        was_ended = threading.Event()
        thread = threading.Thread(target=interrupt)
        thread.start()
        before = backend.transfer_stats.bytes_streamed
        with pytest.raises(PassCancelled):
            keep_extending(backend)
        was_ended.set()
        thread.join()
        disk.slow.clear()
        one_pass = sum(layer.slot_bytes for layer in model.layers)
        assert backend.transfer_stats.bytes_streamed - before < 2 * one_pass
        assert own(backend).n_committed == len(PROMPT)
        own(backend).rollback(0)
        assert same(exercise(backend), expected)


def test_a_layer_read_too_early_is_refused(models):
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
    plan_layers = [pinned(layers[0], lambda name: True), LayerWeights(layers[1].tensors)]
    assert make_schedule(nodes, plan_layers).ends == {2: 1}


def test_a_graph_in_several_parts_is_refused(models, monkeypatch):
    log = ["sched_reserve: graph: nodes = 99, splits = 3, input objects = 4"]
    with pytest.raises(LlamaError, match="divides the graph into 3 parts"):
        check_one_split(log)
    with pytest.raises(LlamaError, match="an unknown number of parts"):
        check_one_split([])


def test_another_layout_of_ggml_tensor_is_noticed(models, paging, monkeypatch):
    fields = [field for field in backends.llama.graph.Tensor._fields_ if field[0] != "view_offs"]
    other = type("Other", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setattr(backends.llama.graph, "Tensor", other)
    with pytest.raises(LlamaError, match="lays out ggml_tensor in another way"):
        streamed(models("llama"))


def test_close_is_idempotent_and_ends_the_readers(models, paging):
    before = threading.active_count()
    backend = streamed(models("llama"))
    own(backend).prefill(PROMPT)
    backend.close()
    backend.close()
    assert threading.active_count() == before


def test_passes_of_two_models_at_once_put_the_switch_interval_back() -> None:
    """Either model may end first."""
    before = sys.getswitchinterval()
    first, second = ExitStack(), ExitStack()
    first.enter_context(QUICK_HANDOVER)
    second.enter_context(QUICK_HANDOVER)
    assert sys.getswitchinterval() < before
    first.close()
    assert sys.getswitchinterval() < before
    second.close()
    assert sys.getswitchinterval() == before


CUTTING = """
import os, sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from gguf_models import save_tiny_gguf
from gguf_streaming import PROMPT, streamed
from backends.llama.context import LlamaContext
from backends.gguf.model import load_gguf_model
from offload.storage.direct_io import StorageError

path = save_tiny_gguf("llama", Path(sys.argv[1]) / "m.gguf", n_layers=2, hidden=256)
model = load_gguf_model(path)
assert not model.is_tied
decode = LlamaContext.decode

def cut_and_decode(self, batch):
    os.truncate(path, 4096)
    return decode(self, batch)

with streamed(model) as backend:
    sequence = backend.new_sequence()
    sequence.prefill(PROMPT)
    time.sleep(0.5)  # all layers are in the ring for the next pass
    LlamaContext.decode = cut_and_decode
    for _ in range(3):
        try:
            sequence.extend([50], [-1])
        except StorageError as error:
            print(error)
"""


def test_a_file_that_is_cut_below_the_embedding_in_the_midst_of_a_pass(tmp_path):
    """Run in a subprocess: access to a mapped page would be a SIGBUS."""
    root = Path(__file__).parents[3]
    paths = (tmp_path, root / "tests" / "helpers", root)
    command = [sys.executable, "-c", CUTTING, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("m.gguf") == 3
