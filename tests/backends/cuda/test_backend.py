"""The torch backend over three tiers, on the fake device: bit-equal to a model in memory."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import FAMILIES
from cpu_engine import CpuEngine
from device_talk import PROMPT, all_there, conversation, everywhere, on_device
from fake_device import Policy
from streaming import no_thread_is_left
from tiered import DEVICE, HOST, STORAGE, tiered_model

from backends.contract.backend import PREFIX, BackendError
from backends.contract.source import BackendOptions, Loading
from backends.cuda.engine import cuda_problem
from backends.cuda.source import HfGpuSource
from backends.cuda.weights import DeviceWeights
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from backends.hf.source import HfSource

__all__ = ["no_thread_is_left"]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def equal(item: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(item, other, strict=True))


@pytest.mark.slow_except(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("copies", Policy)
def test_every_family_is_bit_equal_to_memory(family: str, copies: Policy, checkpoint_factory):
    directory = checkpoint_factory(family)
    engine = CpuEngine(copies)
    with TorchBackend.resident(directory) as resident:
        expected = conversation(resident)
    with on_device(directory, engine) as backend:
        for _ in range(2):
            assert equal(conversation(backend), expected)
            own(backend).rollback(0)
    assert (engine.n_allocated, engine.n_pinned) == (0, 0)


@pytest.mark.parametrize("tier", [DEVICE, HOST, STORAGE])
def test_traffic_of_a_pass(tier: str, checkpoint_factory) -> None:
    model = load_hf_model(checkpoint_factory("llama"))
    plan = tiered_model(model, lambda i, j: tier)
    with TorchBackend(model, DeviceWeights(model, plan, CpuEngine())) as backend:
        for _ in range(4):
            own(backend).extend([5], [PREFIX])
        use = backend.transfer_stats
        assert 4 * plan.moved_bytes <= use.bytes_copied <= 5 * plan.moved_bytes
        # A file ends before its last block does, and how far the read-ahead gets varies.
        tensors = [r.n_bytes for layer in plan.layers for r in layer.tensors if tier == STORAGE]
        assert 4 * sum(tensors) <= use.bytes_streamed <= 6 * plan.streamed_bytes
        assert (use.copy_stall_seconds > 0) == (tier != DEVICE)


def test_a_pass_is_over_when_extend_returns(checkpoint_factory) -> None:
    """The call must return after the pass, so that timings and device errors belong to it."""
    engine = CpuEngine()
    with on_device(checkpoint_factory("llama"), engine, all_there) as backend:
        own(backend).prefill(PROMPT)
        engine.compute_stream.policy = Policy.LATE
        done: list[bool] = []
        engine.compute(lambda: done.append(True))
        own(backend).extend([7], [PREFIX])
        assert done
        engine.compute_stream.policy = Policy.EARLY


def test_a_plan_over_tiers_loads_the_model_onto_the_device(
    checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner's arguments for `ModelSource.load` place the model on the device."""
    budgets: list[int] = []

    def engine(vram_bytes: int) -> CpuEngine:
        budgets.append(vram_bytes)
        return CpuEngine()

    monkeypatch.setattr("backends.cuda.source.CudaEngine", engine)
    directory = checkpoint_factory("llama")
    source = HfGpuSource(HfSource(directory, BackendOptions()))
    loading = Loading(
        tiered_model(source.model, everywhere),
        max_context=64,
        max_nodes=8,
        max_num_tokens=8,
        vram_bytes=123_456_789,
    )
    with source.load(loading) as backend, TorchBackend.resident(directory) as resident:
        assert budgets == [123_456_789]
        assert equal(conversation(backend), conversation(resident))


def test_a_model_loaded_in_inference_mode_is_copied_to_by_threads_outside_of_it(
    checkpoint_factory,
) -> None:
    directory = checkpoint_factory("llama")
    with TorchBackend.resident(directory) as resident:
        expected = conversation(resident)
    with torch.inference_mode(), on_device(directory, CpuEngine(Policy.EARLY)) as backend:
        assert equal(conversation(backend), expected)


def test_masks_are_given_back_with_the_rest(checkpoint_factory) -> None:
    backend = on_device(checkpoint_factory("llama"), CpuEngine())
    conversation(backend)
    state = weakref.ref(backend._runner.layers[0].state)
    backend.close()
    assert state() is None


@pytest.mark.skipif(cuda_problem() is None, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do(checkpoint_factory) -> None:
    source = HfGpuSource(HfSource(checkpoint_factory("llama"), BackendOptions()))
    loading = Loading(tiered_model(source.model, all_there), 64, 8, 8, vram_bytes=1)
    with pytest.raises(BackendError, match="install a CUDA build|check nvidia-smi"):
        source.load(loading)
