"""llama.cpp's library, log and errors; refusals of a backend; its memory."""

import builtins
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from alone import own
from gguf_models import FAMILIES, VOCAB, save_tiny_gguf
from paper_models import PaperModel

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backends.contract.backend import PREFIX, BackendError, TransferStats, UnsupportedModel
from backends.contract.exactness import Exactness
from backends.contract.source import BackendOptions
from backends.ggml.library import LOG, LlamaError, LlamaLog, LlamaModel, load_library
from backends.ggml.operators import load_ggml
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend
from backends.llama.batch import Batch
from backends.llama.context import ContextOptions, LlamaContext
from backends.llama.memory import context_memory, logged_sizes
from backends.llama.passes import PassCancelled
from backends.llama.source import GgufSource
from offload.formats.gguf_index import GgufError
from offload.placement.placement import Placement

pytestmark = pytest.mark.gguf

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "m.gguf")


def test_without_llama_cpp_the_error_says_what_to_install(monkeypatch):
    genuine = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("llama_cpp"):
            raise ImportError(name)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(LlamaError, match=re.escape("pip install 'specdec-stream[gguf]'")):
        load_library.__wrapped__()


def test_an_older_library_is_refused_by_the_field_it_lacks(monkeypatch):
    monkeypatch.setattr("backends.ggml.library._MODEL_FIELDS", "load_mode beam_width")
    with pytest.raises(LlamaError, match="no llama_model_params.beam_width"):
        load_library.__wrapped__()


def test_a_refused_file_gives_the_reason_in_one_line(path, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(LlamaError, match="cannot load .*cut.gguf: .*not within the file") as caught:
        LlamaModel(cut, "mmap")
    assert "\n" not in str(caught.value)


def test_a_refused_context_gives_the_reason(tmp_path):
    # Heads of 16 cannot hold a block of 32.
    path = save_tiny_gguf("qwen2", tmp_path / "m.gguf")
    loaded = LlamaModel(path, "mmap")
    try:
        with pytest.raises(LlamaError, match="q8_0/f16 cache: .*does not divide"):
            LlamaContext(loaded, ContextOptions(60, 8, cache_type_k="q8_0"))
    finally:
        loaded.close()
    with pytest.raises(GgufError, match="q8_0 cannot hold heads of length 16"):
        LlamaBackend(load_gguf_model(path), cache_type_k="q8_0", load_mode="mmap")


def test_the_log_joins_continued_lines_and_keeps_errors_apart():
    log = LlamaLog()
    log.write(2, b"one ")
    log.write(5, b"line\ntwo\n")
    log.write(1, b"debug\n")
    log.write(4, b"cause\n")
    log.write(4, b"consequence\n")
    assert log.lines() == ["one line", "two", "cause", "consequence"]
    assert log.reason() == "cause; consequence"
    log.clear()
    assert log.reason() == "no reason was logged"


def test_ctrl_c_in_the_progress_ends_the_loading(path):
    def progress(n_done, n_total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaModel(path, "ram", progress)


@pytest.fixture
def interrupt_in_the_log(monkeypatch):
    """Function that presses Ctrl-C while llama.cpp's next line is written to the log."""

    def prepare():
        genuine, n_sent = LOG.write, 0

        def write(level, text):
            nonlocal n_sent
            n_sent += 1
            if n_sent == 1:
                signal.raise_signal(signal.SIGINT)
            genuine(level, text)

        monkeypatch.setattr(LOG, "write", write)

    return prepare


def test_ctrl_c_in_the_log_costs_no_line_and_is_raised_after_the_call(path, interrupt_in_the_log):
    """ctypes lost it, and the line with it: plans went on, or missed the size of a buffer."""
    loaded = LlamaModel(path, "none")
    try:
        LlamaContext(loaded, ContextOptions(60, 8)).close()
        lines = LOG.lines()
        assert logged_sizes(lines)
        interrupt_in_the_log()
        with pytest.raises(KeyboardInterrupt):
            LlamaContext(loaded, ContextOptions(60, 8))
        assert LOG.lines()[0] == lines[0]
        assert (len(LOG.lines()), logged_sizes(LOG.lines())) == (len(lines), logged_sizes(lines))
    finally:
        loaded.close()


def test_ctrl_c_in_the_log_ends_the_loading(path, interrupt_in_the_log):
    seen = []
    interrupt_in_the_log()
    with pytest.raises(KeyboardInterrupt):
        LlamaModel(path, "ram", lambda *done: seen.append(done))
    assert len(seen) == 1
    assert LOG.lines()


def test_ctrl_c_in_a_callback_of_a_pass_is_raised_after_it(path):
    def on_node(address, ask, _):
        seen.append(address)
        if len(seen) == 1:
            signal.raise_signal(signal.SIGINT)
        return not ask

    loaded, seen = LlamaModel(path, "mmap"), []
    callback = loaded.library.ggml_backend_sched_eval_callback(on_node)
    context = LlamaContext(loaded, ContextOptions(60, 8), callback)
    try:
        seen = [0]
        context.decode(Batch([3], [0], [[0]], rows=[0]))
        n_nodes = len(seen)
        seen = []
        with pytest.raises(KeyboardInterrupt):
            context.decode(Batch([4], [1], [[0]], rows=[0]))
        assert len(seen) == n_nodes - 1 > 1
    finally:
        context.close()
        loaded.close()


def test_progress_ends_at_the_whole(path):
    seen = []
    LlamaModel(path, "ram", lambda *done: seen.append(done)).close()
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)


def test_batch_points_into_its_arrays():
    library = load_library()
    batch = Batch([5, 6, 7], [0, 1, 1], [[0, 2], [0], [2]], rows=[2, 0, 2])
    struct = batch.as_struct(library)
    assert batch.n_outputs == 2
    assert [struct.token[i] for i in range(3)] == [5, 6, 7]
    assert [struct.pos[i] for i in range(3)] == [0, 1, 1]
    assert [struct.logits[i] for i in range(3)] == [1, 0, 1]
    sequences = [[struct.seq_id[i][j] for j in range(struct.n_seq_id[i])] for i in range(3)]
    assert sequences == [[0, 2], [0], [2]]


@pytest.mark.parametrize("load_mode", ["ram", "mmap"])
def test_contract_in_memory(load_mode, path):
    with LlamaBackend(load_gguf_model(path), max_context=60, load_mode=load_mode) as backend:
        assert backend.vocab_size == VOCAB
        assert backend.max_context == 60
        logits = own(backend).prefill([3, 4, 5])
        assert logits.shape == (VOCAB,)
        assert logits.dtype == np.float32
        _, rows = own(backend).extend([5, 6, 7], [PREFIX] * 3, logits_at=[2, 0])
        _, again = own(backend).extend([7, 5], [PREFIX] * 2)
        assert np.abs(rows - again).max() < 1e-2
        assert own(backend).extend([8], [PREFIX], logits_at=[])[1].shape == (0, VOCAB)
        assert backend.transfer_stats == TransferStats()
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        own(backend).prefill([3])


def test_logits_are_copies(path):
    with LlamaBackend(load_gguf_model(path), max_context=60, load_mode="mmap") as backend:
        first = own(backend).prefill([3, 4, 5])
        cached = first.copy()
        own(backend).prefill([50, 60])
        assert np.array_equal(first, cached)


@pytest.mark.parametrize(
    ("tokens", "parents", "named"),
    [
        ([96], [PREFIX], "invalid token"),
        ([-1], [PREFIX], "neither token ids"),
        ([5], [17], "not a live node"),
        ([5] * 9, [PREFIX] * 9, "11 live nodes are more than the 8"),
    ],
)
def test_a_refused_extend_leaves_the_prefix(tokens, parents, named, path):
    model = load_gguf_model(path)
    with LlamaBackend(model, max_context=60, max_nodes=8, load_mode="mmap") as backend:
        expected = own(backend).prefill([3, 4, 5])
        own(backend).extend([5, 6], [PREFIX] * 2)
        with pytest.raises(BackendError, match=named):
            own(backend).extend(tokens, parents)
        assert own(backend).n_committed == 3
        own(backend).rollback(2)
        assert np.abs(own(backend).prefill([5]) - expected).max() < 1e-2


def test_more_leaves_than_sequences(path, monkeypatch):
    monkeypatch.setattr("backends.llama.context.MAX_LEAVES", 4)
    with LlamaBackend(load_gguf_model(path), max_context=60, load_mode="mmap") as backend:
        expected = own(backend).prefill([3, 4, 5])
        ids, logits = own(backend).extend([5, 6, 7, 8], [PREFIX] * 4)
        own(backend).extend([5, 6, 7, 8], ids)
        own(backend).rollback(3)
        with pytest.raises(
            BackendError, match="all of the cache's 4 sequences are in use, one for each leaf"
        ):
            own(backend).extend([5, 6, 7, 8, 9], [PREFIX] * 5)
        assert np.array_equal(own(backend).extend([5, 6, 7, 8], [PREFIX] * 4)[1], logits)
        own(backend).rollback(2)
        assert np.abs(own(backend).prefill([5]) - expected).max() < 1e-2


def test_a_draft_longer_than_the_window_is_refused(tmp_path):
    model = load_gguf_model(save_tiny_gguf("gemma2", tmp_path / "m.gguf"))
    with LlamaBackend(model, max_context=60, load_mode="mmap") as backend:
        own(backend).prefill([3, 4])
        with pytest.raises(BackendError, match="sliding window of 8"):
            own(backend).extend([5] * 8, [PREFIX, *range(7)])


def test_a_long_pass_in_memory_can_be_cancelled(path):
    model = load_gguf_model(path)
    with LlamaBackend(model, max_context=500, max_nodes=8, load_mode="mmap") as backend:
        expected = own(backend).prefill([3, 4, 5])
        was_cancelled = threading.Event()

        def cancel():
            while not was_cancelled.wait(0.0005):
                backend.request_cancel()

        def keep_reading():
            for _ in range(1000):
                own(backend).rollback(3)
                own(backend).prefill([7] * 490)

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(PassCancelled):
            keep_reading()
        was_cancelled.set()
        thread.join()
        assert own(backend).n_committed == 3
        own(backend).rollback(0)
        assert np.array_equal(own(backend).prefill([3, 4, 5]), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"load_mode": "disk"}, "load_mode 'disk' is not one of"),
        ({"max_nodes": 0}, "max_nodes must be 1 or more"),
        ({"cache_type_k": "q2"}, "cache type 'q2' is not one of"),
        (
            {"load_mode": "ram", "placement": Placement(PaperModel("m", 1, 4096).layers, 2)},
            "takes no placement",
        ),
    ],
)
def test_wrong_options(options, named, path):
    with pytest.raises(ValueError, match=named):
        LlamaBackend(load_gguf_model(path), **options)


def test_a_recurrent_model_is_refused_by_name(path, monkeypatch):
    """The plan refuses it, and the backend one that llama.cpp alone knows to be recurrent."""
    model = replace(load_gguf_model(path), is_recurrent=True, architecture="rwkv7")
    monkeypatch.setattr("backends.llama.source.load_gguf_model", lambda path: model)
    with pytest.raises(UnsupportedModel, match=r"\(rwkv7\) has recurrent layers and does not run"):
        GgufSource(path, BackendOptions())
    with pytest.raises(UnsupportedModel, match="disagree whether"):
        LlamaBackend(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_memory_is_what_llama_cpp_takes(family, tmp_path):
    model = load_gguf_model(save_tiny_gguf(family, tmp_path / "m.gguf"))
    exact = {"exactness": Exactness(True, min_batch_tokens=8), "cache_type_k": "bf16"}
    plain = {"flash_attention": False, "cache_type_k": "f32"}
    weightless = LlamaModel(model.path, "none")
    sequences = {"num_kv_slots": 1000, "max_num_seqs": 16}
    for options in ({}, {"max_nodes": 100}, plain, exact, sequences):
        options = {"max_context": 300, "max_nodes": 8, **options}
        expected = context_memory(model, weightless, ContextOptions(**options))
        with LlamaBackend(model, load_mode="mmap", **options) as backend:
            sizes = logged_sizes(backend._context.log)
            assert expected.compute_bytes == sizes["compute"]
            assert expected.kv_bytes == sizes["cache"]
            assert expected.output_bytes >= sizes["output"] + 8 * VOCAB * 4
            assert backend.kv_bytes <= expected.kv_bytes <= backend.kv_bytes + 22000  # rounding


def test_options_bound_the_outputs():
    options = ContextOptions(4096, 64)
    assert (options.max_num_tokens, options.n_outputs, options.n_sequences) == (512, 64, 65)
    assert ContextOptions(100, 64).max_num_tokens == 100
    assert ContextOptions(4096, 1000).n_sequences == 256
    sequences = ContextOptions(512, 64, num_kv_slots=8000, max_num_seqs=32)
    assert (sequences.max_num_tokens, sequences.n_outputs, sequences.n_sequences) == (512, 64, 127)
    assert (sequences.n_cells, replace(sequences, max_num_seqs=100).n_outputs) == (8192, 100)


def test_neither_torch_nor_transformers_is_imported(path):
    code = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend
from backends.llama.context import ContextOptions
from backends.ggml.library import LlamaModel
from backends.llama.memory import context_memory
model = load_gguf_model({str(path)!r})
context_memory(model, LlamaModel(model.path, "none"), ContextOptions(60, 4))
with LlamaBackend(model, max_context=60, load_mode="mmap") as backend:
    backend.new_sequence().prefill([3, 4, 5])
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_another_llama_cpp_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = ModuleSpec("llama_cpp", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("backends.ggml.library.find_spec", lambda name: elsewhere)
    with pytest.raises(LlamaError, match="pip install --upgrade"):
        load_ggml.__wrapped__()
