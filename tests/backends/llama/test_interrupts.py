"""Ctrl-C anywhere in a streamed llama.cpp pass, once and twice: what comes after it is right."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from gguf_models import save_tiny_gguf
from interrupting import files_of, interrupted

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from backends.contract.backend import PREFIX
from backends.gguf.model import load_gguf_model
from backends.llama.backend import LlamaBackend
from offload.residency.placement import Placement

# An interrupt inside of what is being dropped is reported, not raised.
pytestmark = [
    pytest.mark.gguf,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
PROMPT = [3, 17, 5, 60, 41, 8]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    model = load_gguf_model(save_tiny_gguf("llama", path, n_layers=2))
    plan = Placement(model.layers, 1)
    with LlamaBackend(
        model, residency=plan, max_context=40, max_nodes=8, n_threads=1, flash_attention=True
    ) as made:
        yield made


def rows(backend: LlamaBackend) -> np.ndarray:
    """The logits of a prompt and of a tree below it, from nothing."""
    backend.rollback(0)
    prefill = backend.prefill(PROMPT)
    first = backend.next_node_id
    return np.vstack([prefill, backend.extend([7, 20, 30], [PREFIX, first, first])[1]])


@pytest.mark.parametrize("then", [None, 2, 5])
def test_at_calls(backend: LlamaBackend, then: int | None) -> None:
    expected = rows(backend)
    places: set[str] = set()
    for first in range(1, 2000, 5):
        with interrupted(first, then, ("backends", "offload")) as interrupts:
            rows(backend)
        assert np.array_equal(rows(backend), expected), interrupts.places
        places.update(interrupts.places)
        if not interrupts.places:
            break
    assert "interruptible.py" in files_of(places)


def test_signals_at_any_time(backend: LlamaBackend) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected, n_interrupted = rows(backend), 0
    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(80):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.01))
                try:
                    for _ in range(20):
                        rows(backend)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    n_interrupted += 1
            assert np.array_equal(rows(backend), expected)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert n_interrupted > 40
