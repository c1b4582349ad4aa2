"""A pass cancelled while its storage hangs: it ends, and the next pass is unaffected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from alone import own
from cpu_engine import CpuEngine
from gguf_models import save_tiny_gguf
from hanging_storage import HangingStorage
from tiered import STORAGE, tiered_model

from backends.contract.backend import PREFIX, Backend, BackendError
from backends.cuda.weights import DeviceWeights
from backends.hf import backend as torch_backend
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import load_hf_model
from offload.placement.placement import Placement

PROMPT = [3, 17, 5, 60, 41, 8]
N_LAYERS = 6  # more than slots, so that no pass can do without a read


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStorage]:
    made = HangingStorage(monkeypatch)
    yield made
    made.let_go()


def on_cpu(checkpoint_factory: Callable[..., Any], _: Any) -> Backend:
    model = load_hf_model(checkpoint_factory("llama", num_hidden_layers=N_LAYERS))
    return TorchBackend(model, CpuWeights(model, model.layer_weights, 2))


def on_device(checkpoint_factory: Callable[..., Any], _: Any) -> Backend:
    model = load_hf_model(checkpoint_factory("llama", num_hidden_layers=N_LAYERS))
    plan = tiered_model(model, lambda layer, tensor: STORAGE)
    assert plan.n_slots + plan.n_device_slots < N_LAYERS
    return TorchBackend(model, DeviceWeights(model, plan, CpuEngine()))


def llama_backend(_: Any, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    pytest.importorskip("llama_cpp")
    from backends.gguf.model import load_gguf_model
    from backends.llama.backend import LlamaBackend

    path = save_tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "m.gguf", n_layers=N_LAYERS)
    model = load_gguf_model(path)
    plan = Placement(model.layers, 2)
    return LlamaBackend(model, placement=plan, max_context=40, max_nodes=8, n_threads=1)


KINDS = [
    pytest.param(on_cpu, id="torch"),
    pytest.param(on_device, id="device"),
    pytest.param(llama_backend, id="gguf", marks=pytest.mark.gguf),
]


@pytest.fixture(params=KINDS)
def backend(
    request: pytest.FixtureRequest,
    storage: HangingStorage,
    checkpoint_factory: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Backend]:
    with request.param(checkpoint_factory, tmp_path_factory) as made:
        yield made
        storage.let_go()  # before it is closed


def extend(backend: Backend) -> np.ndarray:
    return own(backend).extend([7, 20, 30], [PREFIX] * 3)[1]


def request(backend: Backend, is_over: threading.Event) -> None:
    while not is_over.wait(0.001):  # a cancel before the pass begins is lost
        backend.request_cancel()


def cut_short(backend: Backend, storage: HangingStorage) -> None:
    """Cancel a pass that waits for a hanging read."""
    has_begun, is_over = threading.Event(), threading.Event()

    def cut_when_it_hangs() -> None:
        has_begun.wait()
        storage.wait_until_reached()
        request(backend, is_over)

    def run_pass() -> None:
        has_begun.set()
        extend(backend)

    thread = threading.Thread(target=cut_when_it_hangs)
    thread.start()
    try:
        with pytest.raises(BackendError):
            run_pass()
    finally:
        is_over.set()
        thread.join()
    assert storage.is_hanging
    assert own(backend).n_committed == len(PROMPT)


def test_a_read_that_does_not_end(backend: Backend, storage: HangingStorage) -> None:
    own(backend).prefill(PROMPT)
    expected = extend(backend)
    own(backend).rollback(len(PROMPT))
    storage.hang()
    for _ in range(2):  # the same read still hangs when the next pass comes to it
        cut_short(backend, storage)
    storage.let_go()
    assert np.array_equal(extend(backend), expected)
    own(backend).rollback(len(PROMPT))
    assert np.array_equal(extend(backend), expected)


def test_a_long_prompt_ends_between_two_chunks_of_a_layer(
    checkpoint_factory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "CHUNK_TOKENS", 2)
    with TorchBackend.resident(checkpoint_factory("llama")) as backend:
        expected = own(backend).prefill(PROMPT)
        own(backend).rollback(0)
        runner = backend._runners[1]
        forward, chunks = runner._forward, []

        def cancelling(hidden: Any, **rest: Any) -> Any:
            chunks.append(hidden.shape[1])
            backend.request_cancel()
            return forward(hidden, **rest)

        runner._forward = cancelling
        with pytest.raises(BackendError, match="the pass was cancelled"):
            own(backend).prefill(PROMPT)
        assert chunks == [2]
        runner._forward = forward
        assert np.array_equal(own(backend).prefill(PROMPT), expected)
