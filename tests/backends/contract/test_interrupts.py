"""Ctrl-C anywhere in a pass, once and again during the repair: what comes after it is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cpu_engine import CpuEngine
from fake_device import Policy
from interrupting import files_of, interrupted
from tiered import DEVICE, HOST, STORAGE, tiered_model

from backends.contract.backend import PREFIX, BackendError
from backends.cuda.weights import DeviceWeights
from backends.hf import layer_runner
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import load_hf_model
from backends.hf.weights import TorchWeights

# An interrupt inside of a generator that is being dropped is reported, not raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FOLDERS = ("backends", "offload")
PROMPT = [3, 17, 5, 60, 41, 8]
NODES, PARENTS = [7, 20, 30], [-1, 0, 0]
SECONDS = (None, 1, 2, 3, 5, 8, 13)


@pytest.fixture(params=["streamed", "half", "device"])
def backend(request, checkpoint_factory) -> Iterator[TorchBackend]:
    """All layers through a ring of two slots; or every second one resident; or three tiers."""
    model = load_hf_model(checkpoint_factory("llama"))
    layers = list(model.layer_weights)
    if request.param == "half":
        layers[1] = layers[1].with_resident(frozenset(t.name for t in layers[1].tensors))
    weights: TorchWeights = CpuWeights(model, layers, 2)
    if request.param == "device":
        weights.close()
        plan = tiered_model(model, lambda i, j: (STORAGE, HOST, DEVICE)[(i + j) % 3])
        weights = DeviceWeights(model, plan, CpuEngine(Policy.RANDOM))
    with TorchBackend(model, weights) as made:
        yield made


def extend(backend: TorchBackend) -> tuple[list[int], np.ndarray]:
    first = backend.next_node_id
    return backend.extend(NODES, [PREFIX if p < 0 else first + p for p in PARENTS])


def rows(backend: TorchBackend) -> np.ndarray:
    """The logits of a prompt and of a tree below it, from nothing."""
    backend.rollback(0)
    prefill = backend.prefill(PROMPT)
    return np.vstack([prefill, extend(backend)[1]])


def test_what_is_closed_meanwhile_is_not_mended(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal handler: what would be mended is freed."""

    def close(*_: object) -> np.ndarray:
        backend.close()
        raise BackendError("the pass was cancelled")

    repairs: list[object] = []
    monkeypatch.setattr(backend, "_compute", close)
    monkeypatch.setattr(backend, "_restart", lambda: repairs.append("restart"))
    with pytest.raises(BackendError, match="the pass was cancelled"):
        backend.prefill(PROMPT)
    assert repairs == []


def interrupt_everywhere(act: Callable[[], object], check: Callable[[], None]) -> set[str]:
    """`act` interrupted at every second call, and at some calls of what the interrupt starts."""
    places: set[str] = set()
    for first in range(1, 2000, 2):
        then = SECONDS[first % len(SECONDS)]
        with interrupted(first, then, FOLDERS) as interrupts:
            act()
        check()
        places.update(interrupts.places)
        if not interrupts.places:
            return places
    raise AssertionError("it never ran to its end")


def test_a_prefill_and_an_extend(backend: TorchBackend) -> None:
    expected = rows(backend)

    def act() -> None:
        backend.rollback(0)
        backend._pool.free()  # it has to be made anew
        rows(backend)

    def check() -> None:
        assert np.array_equal(rows(backend), expected)

    places = interrupt_everywhere(act, check)
    assert {"backend.py", "pool.py", "sequence.py", "layer_runner.py"} <= files_of(places)


def test_the_committed_prefix_stays(backend: TorchBackend) -> None:
    backend.prefill(PROMPT)
    expected = extend(backend)[1]
    backend.rollback(len(PROMPT))

    def check() -> None:
        assert backend.n_committed == len(PROMPT)
        # Nodes may be live: the interrupt came as the call was over.
        assert np.abs(extend(backend)[1] - expected).max() < 1e-4
        backend.rollback(len(PROMPT))

    interrupt_everywhere(lambda: extend(backend), check)


def test_a_commit_is_whole_or_not_at_all(backend: TorchBackend) -> None:
    """Rows 0 and 2 of the tree: one of them has to move."""
    backend.prefill(PROMPT)
    ids, _ = extend(backend)
    backend.commit([ids[0], ids[2]])
    after = extend(backend)[1]
    backend.rollback(len(PROMPT))
    before = extend(backend)[1]
    for first in range(1, 200):
        backend.rollback(0)
        backend.prefill(PROMPT)
        ids, _ = extend(backend)
        with interrupted(first, SECONDS[first % len(SECONDS)], FOLDERS) as interrupts:
            backend.commit([ids[0], ids[2]])
        backend.prune([])
        if not interrupts.places:
            break
        assert backend.n_committed in (len(PROMPT), len(PROMPT) + 2)
        expected = before if backend.n_committed == len(PROMPT) else after
        assert np.abs(extend(backend)[1] - expected).max() < 1e-4
    assert backend.n_committed == len(PROMPT) + 2


def test_a_rollback_is_done_again(backend: TorchBackend) -> None:
    backend.prefill(PROMPT)
    backend.rollback(3)
    expected = extend(backend)[1]
    for first in range(1, 200):
        backend.rollback(0)
        backend.prefill(PROMPT)
        with interrupted(first, SECONDS[first % len(SECONDS)], FOLDERS) as interrupts:
            backend.rollback(3)
        backend.rollback(3)
        assert np.abs(extend(backend)[1] - expected).max() < 1e-4
        if not interrupts.places:
            break


def test_an_interrupt_instead_of_letting_go_of_a_layer(
    backend: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the layer would keep its tensors, whose slot then holds another layer's."""
    expected = rows(backend)

    def cut(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(layer_runner, "unbind", cut)
        with pytest.raises(KeyboardInterrupt):
            rows(backend)
    for _ in range(3):
        assert np.array_equal(rows(backend), expected)


def test_a_refused_rollback_changes_nothing(backend: TorchBackend) -> None:
    backend.prefill(PROMPT)
    for length in (-1, len(PROMPT) + 1):
        with pytest.raises(BackendError, match="cannot roll back"):
            backend.rollback(length)
        assert backend.n_committed == len(PROMPT)


def test_a_closed_backend_says_so(checkpoint_factory: Callable[[str], Path]) -> None:
    backend = TorchBackend.resident(checkpoint_factory("llama"))
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="is closed; load the model again"):
        backend.prefill(PROMPT)


def test_a_cancel_ends_the_pass_and_only_that(backend: TorchBackend) -> None:
    expected = rows(backend)
    runner = backend._runners[1]
    forward = runner._forward

    def cancelling(*args: object, **kwargs: object) -> object:
        backend.request_cancel()
        return forward(*args, **kwargs)

    runner._forward = cancelling
    with pytest.raises(BackendError, match="the pass was cancelled"):
        rows(backend)
    runner._forward = forward
    assert np.array_equal(rows(backend), expected)
