"""The orderings that the fake device tests, and equality with the CPU, on a real GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from alone import own
from device_talk import (
    PROMPT,
    all_there,
    conversation,
    everywhere,
    on_device,
)
from streaming import no_thread_is_left, uneven_sizes
from tiered import HOST, tiered
from transformers import AutoModelForCausalLM
from weight_files import Weights, write_weights

from backends.contract.backend import PREFIX
from backends.cuda.engine import CudaEngine, PinningFailed, cuda_problem, pin, vram_peak_bytes
from backends.cuda.errors import VramExceeded
from backends.hf.backend import TorchBackend
from offload.device.streamer import DeviceStreamer
from offload.storage.aligned import ALIGNMENT
from offload.units import GIB, MIB

__all__ = ["no_thread_is_left"]

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(cuda_problem() is not None, reason=str(cuda_problem())),
    pytest.mark.usefixtures("no_thread_is_left"),
]
CYCLES = 20_000_000  # of torch.cuda._sleep: some ten milliseconds
DRIFT = 1e-4
"""Tolerance for fp32 sums in another order, relative to the largest logit."""


@pytest.fixture
def engine() -> CudaEngine:
    """An engine with enough memory for every test, each starting clean."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return CudaEngine(2 * GIB)


def contents_on_device(engine: CudaEngine, weights: Weights) -> dict[str, torch.Tensor]:
    """Copy the file contents to the device at once: comparing then never blocks the host."""
    with engine.computing():
        return {
            name: torch.tensor(list(content), dtype=torch.uint8, device=engine.device)
            for name, content in weights.contents.items()
        }


@pytest.mark.parametrize("slow", ["compute", "copies", "neither"])
def test_layers_arrive_whole_and_in_time(tmp_path: Path, engine: CudaEngine, slow: str) -> None:
    weights = write_weights(tmp_path, uneven_sizes(7, 2, 300_000), n_files=2)
    plan = tiered(weights, everywhere)
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
                for name, actual in tensors.items():
                    n_wrong.append((actual != contents[name]).sum())
    streamer.close()
    assert n_wrong
    assert all(int(count) == 0 for count in n_wrong)


def test_a_copy_from_pinned_memory_does_not_block_the_host(engine: CudaEngine) -> None:
    pinned, target = engine.allocate_pinned(64 * MIB), engine.allocate_device(64 * MIB)
    with torch.cuda.stream(engine._copying):
        torch.cuda._sleep(50 * CYCLES)
    engine.copy(pinned.view, target, 0)
    event = engine.record_copy()
    assert not event.is_done()  # enqueued behind the sleeping kernel
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


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "bloom", "mistral"])
def test_three_tiers_equal_vram_and_the_cpu(
    family: str, engine: CudaEngine, checkpoint_factory
) -> None:
    directory = checkpoint_factory(family)
    with TorchBackend.resident(directory) as cpu:
        expected = conversation(cpu)
    seen = {}
    for name, tier_of in (("vram", all_there), ("tiers", everywhere)):
        with on_device(directory, engine, tier_of) as backend:
            seen[name] = [
                conversation(backend),
                (own(backend).rollback(0), conversation(backend))[1],
            ]
    for item, two in zip(seen["vram"], seen["tiers"], strict=True):
        for in_vram, through_tiers, on_cpu in zip(item, two, expected, strict=True):
            assert np.array_equal(in_vram, through_tiers)
            assert np.abs(in_vram - on_cpu).max() <= DRIFT * max(1.0, np.abs(on_cpu).max())


def test_out_of_memory_is_ours_and_leaves_the_prefix(checkpoint_factory) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    budget = 512 * MIB
    engine = CudaEngine(budget)
    with on_device(checkpoint_factory("llama"), engine, lambda i, j: HOST) as backend:
        own(backend).prefill(PROMPT)
        _, expected = own(backend).extend([7, 9], [PREFIX, PREFIX])
        own(backend).rollback(len(PROMPT))
        forward = backend._runner.layers[1]._forward

        def greedy(*args: object, **kwargs: object) -> object:
            torch.empty(budget, dtype=torch.uint8, device="cuda")
            return forward(*args, **kwargs)

        backend._runner.layers[1]._forward = greedy
        with pytest.raises(VramExceeded, match="raise (--vram-budget|vram_budget)"):
            own(backend).extend([7, 9], [PREFIX, PREFIX])
        backend._runner.layers[1]._forward = forward
        assert own(backend).n_committed == len(PROMPT)
        assert np.array_equal(own(backend).extend([7, 9], [PREFIX, PREFIX])[1], expected)
    assert vram_peak_bytes() <= budget


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(
    dtype: str, engine: CudaEngine, checkpoint_factory, tmp_path: Path
) -> None:
    whole = AutoModelForCausalLM.from_pretrained(checkpoint_factory("llama"))
    whole.to(getattr(torch, dtype)).save_pretrained(directory := tmp_path / dtype)
    with TorchBackend.resident(directory) as cpu, on_device(directory, engine) as backend:
        for ours, theirs in zip(conversation(backend), conversation(cpu), strict=True):
            assert np.abs(ours - theirs).max() <= 0.1 * max(1.0, np.abs(theirs).max())


def test_memory_that_cannot_be_pinned_is_ours_and_leaves_no_error_behind(
    engine: CudaEngine,
) -> None:
    pinned = engine.allocate_pinned(MIB)
    with pytest.raises(PinningFailed, match="1.00 MiB of host memory cannot be pinned"):
        pin(pinned.address, MIB, engine.device)  # is pinned already
    with engine.computing():
        assert int(torch.ones(3, device=engine.device).sum()) == 3
    pinned.close()
