"""The torch backend over three tiers, on the fake device: bit-equal to a model in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES
from cpu_engine import CpuEngine
from fake_device import Policy
from streaming import no_thread_is_left
from tiered import DEVICE, HOST, STORAGE, tiered_model

from backends.base import PREFIX, Backend, BackendError
from backends.cuda_engine import VramExceeded, cuda_problem, wanted_bytes
from backends.device_weights import DeviceWeights
from backends.hf_model import load_hf_model
from backends.hf_source import HfSource
from backends.source import BackendOptions, Loading
from backends.torch_backend import TorchBackend
from offload.budget import BudgetExceeded
from offload.plan import plan_residency

__all__ = ["no_thread_is_left"]

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
NODES, PARENTS = [7, 20, 30, 21, 22, 31, 40], [-1, 0, 0, 1, 3, 2, 3]
TIERS = [STORAGE, HOST, DEVICE, STORAGE, HOST]


def on_device(directory: Path, engine: CpuEngine, tier_of=None, **options) -> TorchBackend:
    """Tensors dealt out over the tiers by turns, unless `tier_of` says otherwise."""
    model = load_hf_model(directory)
    plan = tiered_model(model, tier_of or (lambda i, j: TIERS[(i + j) % 5]))
    return TorchBackend(model, DeviceWeights(model, plan, engine), **options)


def conversation(backend: Backend) -> list[np.ndarray]:
    """A prompt, a tree, a commit that moves rows, a tree below it, a rollback, a prompt."""
    seen = [backend.prefill(PROMPT)]
    first = backend.next_node_id
    ids, logits = backend.extend(NODES, [PREFIX if p < 0 else first + p for p in PARENTS])
    seen.append(logits)
    backend.commit([ids[0], ids[2]], keep=[ids[5]])
    seen.append(backend.extend([50, 51], [ids[5], PREFIX], rows=[1])[1])
    backend.rollback(5)
    return [*seen, backend.prefill(PROMPT[5:])]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


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
            backend.rollback(0)
    assert (engine.n_allocated, engine.n_pinned) == (0, 0)


@pytest.mark.parametrize("tier", [DEVICE, HOST, STORAGE])
def test_traffic_of_a_pass(tier: str, checkpoint_factory) -> None:
    model = load_hf_model(checkpoint_factory("llama"))
    plan = tiered_model(model, lambda i, j: tier)
    with TorchBackend(model, DeviceWeights(model, plan, CpuEngine())) as backend:
        for _ in range(4):
            backend.extend([5], [PREFIX])
        use = backend.stream_use
        assert 4 * plan.copied_bytes <= use.bytes_copied <= 5 * plan.copied_bytes
        assert 4 * plan.streamed_bytes <= use.bytes_streamed <= 6 * plan.streamed_bytes
        assert (use.copy_stall_seconds > 0) == (tier != DEVICE)


def test_a_cancel_ends_the_pass_and_only_that(checkpoint_factory) -> None:
    with on_device(checkpoint_factory("llama"), CpuEngine()) as backend:
        expected = conversation(backend)
        runner = backend._runners[1]
        forward = runner._forward

        def cancelling(*args: object, **kwargs: object) -> object:
            backend.request_cancel()
            return forward(*args, **kwargs)

        runner._forward = cancelling
        backend.rollback(0)
        with pytest.raises(BackendError, match="the pass was cancelled"):
            backend.prefill(PROMPT)
        runner._forward = forward
        assert backend.n_committed == 0
        assert equal(conversation(backend), expected)


def test_out_of_memory_in_mid_pass_is_our_error_and_leaves_the_prefix(checkpoint_factory) -> None:
    """torch's own error, as the CUDA allocator raises it, at every layer of a pass."""
    with on_device(checkpoint_factory("llama"), CpuEngine()) as backend:
        backend.prefill(PROMPT)
        _, expected = backend.extend([7, 9], [PREFIX, PREFIX])
        backend.rollback(len(PROMPT))
        for runner in backend._runners:
            forward = runner._forward

            def failing(*args: object, forward=forward, **kwargs: object) -> object:
                forward(*args, **kwargs)
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity"
                )

            runner._forward = failing
            with pytest.raises(
                BudgetExceeded, match="20.00 MiB more.*raise --vram-budget"
            ) as raised:
                backend.extend([7, 9], [PREFIX, PREFIX])
            runner._forward = forward
            assert raised.value.wanted_bytes == 20 * 2**20
            assert "\n" not in str(raised.value)
            assert backend.n_committed == len(PROMPT)
            assert np.array_equal(backend.extend([7, 9], [PREFIX, PREFIX])[1], expected)
            backend.rollback(len(PROMPT))


def test_out_of_memory_lets_go_of_the_activations() -> None:
    """Else the next pass would find the memory taken by the one that broke off."""
    alive: list[torch.Tensor] = []

    class Watched:
        def __init__(self) -> None:
            alive.append(self)

        def __del__(self) -> None:
            dead.append(True)

    dead: list[bool] = []

    def broken_pass() -> None:
        activation = Watched()
        alive.clear()
        raise torch.OutOfMemoryError(f"CUDA out of memory. {type(activation)}")

    with pytest.raises(VramExceeded) as raised, CpuEngine().computing():
        broken_pass()
    assert dead, "the error still refers to the frames of the pass"
    assert raised.value.wanted_bytes == 0


def test_other_errors_pass_through() -> None:
    for error in (RuntimeError("size mismatch"), KeyError("x")):
        with pytest.raises(type(error)), CpuEngine().computing():
            raise error


@pytest.mark.parametrize(
    ("said", "n_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 512 bytes. GPU 0 has", 512),
        ("CUDA out of memory. Tried to allocate 2.50 KiB. GPU 0 has", 2560),
        ("CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has", 5 * 2**28),
        ("CUDA error: out of memory", 0),
    ],
)
def test_what_torch_says_was_asked_for(said: str, n_bytes: int) -> None:
    assert wanted_bytes(said) == n_bytes


def test_only_weights_on_the_device_can_be_shared(checkpoint_factory) -> None:
    directory = checkpoint_factory("llama")
    sizes = {"max_context": 64, "max_nodes": 8, "max_rows": 8}
    with (
        on_device(directory, CpuEngine()) as streamed,
        pytest.raises(BackendError, match="cannot share its weights"),
    ):
        streamed.sibling(**sizes)
    with on_device(directory, CpuEngine(), lambda i, j: DEVICE) as held:
        expected = held.prefill(PROMPT)
        with held.sibling(**sizes) as other:
            assert np.array_equal(other.prefill(PROMPT), expected)
            assert np.array_equal(held.prefill_from(PROMPT)[1], other.prefill_from(PROMPT)[1])


def test_a_saved_prefix_is_restored_on_the_device(checkpoint_factory) -> None:
    directory = checkpoint_factory("llama")
    with on_device(directory, CpuEngine()) as backend:
        backend.prefill(PROMPT)
        shapes = backend.prefix_tensors()
        saved = {shape.name: memoryview(bytearray(shape.n_bytes)) for shape in shapes}
        backend.save_prefix(saved)
        expected = backend.extend([7], [PREFIX])[1]
        backend.rollback(0)
        backend.load_prefix(PROMPT, {shape.name: (shape, saved[shape.name]) for shape in shapes})
        assert np.array_equal(backend.extend([7], [PREFIX])[1], expected)


def test_a_plan_over_tiers_loads_the_model_onto_the_device(
    checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the planner hands to `ModelSource.load`."""
    budgets: list[int] = []

    def engine(vram_bytes: int) -> CpuEngine:
        budgets.append(vram_bytes)
        return CpuEngine()

    monkeypatch.setattr("backends.hf_source.CudaEngine", engine)
    directory = checkpoint_factory("llama")
    source = HfSource(directory, BackendOptions())
    loading = Loading(
        plan_residency(source.layers, 10**9),
        max_context=64,
        max_nodes=8,
        max_rows=8,
        tiers=tiered_model(source.model, lambda i, j: TIERS[(i + j) % 5]),
        vram_bytes=123_456_789,
    )
    with source.load(loading) as backend, TorchBackend.resident(directory) as resident:
        assert budgets == [123_456_789]
        assert equal(conversation(backend), conversation(resident))


@pytest.mark.skipif(cuda_problem() is None, reason="there is a GPU")
def test_without_a_gpu_one_line_says_what_to_do(checkpoint_factory) -> None:
    source = HfSource(checkpoint_factory("llama"), BackendOptions())
    tiers = tiered_model(source.model, lambda i, j: DEVICE)
    loading = Loading(plan_residency(source.layers, 10**9), 64, 8, 8, tiers=tiers, vram_bytes=1)
    with pytest.raises(BackendError, match="install a CUDA build|check nvidia-smi"):
        source.load(loading)
