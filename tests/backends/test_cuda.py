"""On a GPU: the orderings that the fake device tests, and equality with the CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from streaming import no_thread_is_left, uneven_sizes
from tiered import DEVICE, HOST, STORAGE, tiered, tiered_model
from transformers import AutoModelForCausalLM
from weight_files import Weights, write_weights

from backends.base import PREFIX
from backends.cuda_engine import CudaEngine, VramExceeded, cuda_problem, vram_peak_bytes
from backends.device_weights import DeviceWeights
from backends.hf_model import load_hf_model
from backends.torch_backend import TorchBackend
from offload.device_streamer import DeviceStreamer
from offload.direct_io import ALIGNMENT
from offload.units import GIB, MIB

__all__ = ["no_thread_is_left"]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(cuda_problem() is not None, reason=str(cuda_problem())),
    pytest.mark.usefixtures("no_thread_is_left"),
]
TIERS = [STORAGE, HOST, DEVICE, STORAGE, HOST]
PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
NODES, PARENTS = [7, 20, 30, 21, 22, 31, 40], [-1, 0, 0, 1, 3, 2, 3]
CYCLES = 20_000_000  # of torch.cuda._sleep: some ten milliseconds
DRIFT = 1e-4
"""Of fp32 sums in another order, relative to the largest logit."""


@pytest.fixture
def engine() -> CudaEngine:
    """With room for every test; no test sees what another one has left behind."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return CudaEngine(2 * GIB)


def contents_on_device(engine: CudaEngine, weights: Weights) -> dict[str, torch.Tensor]:
    """What the files hold, copied at once: to compare with it makes nobody wait for the host."""
    with engine.computing():
        return {
            name: torch.tensor(list(content), dtype=torch.uint8, device=engine.device)
            for name, content in weights.contents.items()
        }


@pytest.mark.parametrize("slow", ["compute", "copies", "neither"])
@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_layers_arrive_whole_and_in_time(
    tmp_path: Path, engine: CudaEngine, n_slots: int, slow: str
) -> None:
    weights = write_weights(tmp_path, uneven_sizes(7, n_slots, 300_000), n_files=2)
    plan = tiered(weights, lambda i, j: TIERS[(i + j) % 5], n_slots, 2)
    streamer = DeviceStreamer(plan, engine, read_bytes=16 * ALIGNMENT)
    contents = contents_on_device(engine, weights)
    n_wrong = []  # bytes of one tensor, counted on the device
    for _ in range(4):
        for index in range(7):
            with engine.computing(), streamer.layer(index) as tensors:
                if slow == "compute":
                    torch.cuda._sleep(CYCLES)
                elif slow == "copies":
                    with torch.cuda.stream(engine._copying):
                        torch.cuda._sleep(CYCLES)
                for name, found in tensors.items():
                    n_wrong.append((found != contents[name]).sum())
    streamer.close()
    assert n_wrong
    assert all(int(count) == 0 for count in n_wrong)


def test_a_copy_from_pinned_memory_does_not_hold_the_host_up(engine: CudaEngine) -> None:
    pinned, target = engine.allocate_pinned(64 * MIB), engine.allocate_device(64 * MIB)
    with torch.cuda.stream(engine._copying):
        torch.cuda._sleep(50 * CYCLES)
    engine.copy(pinned.view, target, 0)
    event = engine.record_copy()
    assert not event.is_done()  # enqueued, behind what sleeps
    event.wait()
    assert event.is_done()
    pinned.close()
    target.close()


def test_pinned_memory_takes_what_was_asked_for_and_can_be_read_into(engine: CudaEngine) -> None:
    buffer = engine.allocate_pinned(3 * MIB + 5)
    assert len(buffer.view) == 3 * MIB + ALIGNMENT
    assert buffer.address % ALIGNMENT == 0
    assert torch.frombuffer(buffer.view, dtype=torch.uint8).is_pinned()
    buffer.close()
    buffer.close()


def test_events_measure_the_device(engine: CudaEngine) -> None:
    before = engine.record_compute()
    with engine.computing():
        torch.cuda._sleep(CYCLES)
    after = engine.record_compute()
    after.wait()
    assert after.seconds_after(before) > 0


def conversation(backend: TorchBackend) -> list[np.ndarray]:
    seen = [backend.prefill(PROMPT)]
    first = backend.next_node_id
    ids, logits = backend.extend(NODES, [PREFIX if p < 0 else first + p for p in PARENTS])
    seen.append(logits)
    backend.commit([ids[0], ids[2]], keep=[ids[5]])
    seen.append(backend.extend([50, 51], [ids[5], PREFIX], rows=[1])[1])
    backend.rollback(5)
    return [*seen, backend.prefill(PROMPT[5:])]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "bloom", "mistral"])
def test_three_tiers_equal_vram_and_the_cpu(
    family: str, engine: CudaEngine, checkpoint_factory
) -> None:
    directory = checkpoint_factory(family)
    with TorchBackend.resident(directory) as cpu:
        expected = conversation(cpu)
    seen = {}
    for name, tier_of in (
        ("vram", lambda i, j: DEVICE),
        ("tiers", lambda i, j: TIERS[(i + j) % 5]),
    ):
        model = load_hf_model(directory)
        weights = DeviceWeights(model, tiered_model(model, tier_of), engine)
        with TorchBackend(model, weights) as backend:
            seen[name] = [conversation(backend), (backend.rollback(0), conversation(backend))[1]]
    for one, two in zip(seen["vram"], seen["tiers"], strict=True):
        for on_device, through_tiers, on_cpu in zip(one, two, expected, strict=True):
            assert np.array_equal(on_device, through_tiers)
            assert np.abs(on_device - on_cpu).max() <= DRIFT * max(1.0, np.abs(on_cpu).max())


def test_out_of_memory_is_ours_and_leaves_the_prefix(checkpoint_factory) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = 512 * MIB
    model = load_hf_model(checkpoint_factory("llama"))
    plan = tiered_model(model, lambda i, j: HOST)
    with TorchBackend(model, DeviceWeights(model, plan, CudaEngine(budget))) as backend:
        backend.prefill(PROMPT)
        _, expected = backend.extend([7, 9], [PREFIX, PREFIX])
        backend.rollback(len(PROMPT))
        forward = backend._runners[1]._forward

        def greedy(*args: object, **kwargs: object) -> object:
            torch.empty(budget, dtype=torch.uint8, device="cuda")
            return forward(*args, **kwargs)

        backend._runners[1]._forward = greedy
        with pytest.raises(VramExceeded, match="raise --vram-budget"):
            backend.extend([7, 9], [PREFIX, PREFIX])
        backend._runners[1]._forward = forward
        assert backend.n_committed == len(PROMPT)
        assert np.array_equal(backend.extend([7, 9], [PREFIX, PREFIX])[1], expected)
    assert vram_peak_bytes() <= budget


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(
    dtype: str, engine: CudaEngine, checkpoint_factory, tmp_path: Path
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(checkpoint_factory("llama"))
    whole.to(getattr(torch, dtype)).save_pretrained(directory := tmp_path / dtype)
    model = load_hf_model(directory)
    plan = tiered_model(model, lambda i, j: TIERS[(i + j) % 5])
    with (
        TorchBackend.resident(directory) as cpu,
        TorchBackend(model, DeviceWeights(model, plan, engine)) as backend,
    ):
        for ours, theirs in zip(conversation(backend), conversation(cpu), strict=True):
            assert np.abs(ours - theirs).max() <= 0.1 * max(1.0, np.abs(theirs).max())
