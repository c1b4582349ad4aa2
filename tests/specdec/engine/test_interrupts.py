"""Ctrl-C anywhere in a generation, once or twice: the next generation has the same output."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from forced_streaming import force_streaming
from interrupting import interrupted
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.metrics.stats import GenerationStats

# An interrupt in a generator that is being collected is reported, not raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FOLDERS = ("specdec", "backends", "offload")
PROMPT = list(range(10, 30))
N_TOKENS = 4


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    draft = save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=2)
    size = {"num_draft_tokens": 6, "draft_depth": 3, "ctx_size": 128, "draft_ahead": "on"}
    with pytest.MonkeyPatch.context() as patch:
        force_streaming(patch)
        loaded = specdec.load(target, draft, **size)
    with loaded:
        assert loaded.plan.placement.n_streamed_layers == 3
        assert drafted_ahead(loaded.generate(PROMPT, max_tokens=N_TOKENS).stats)
        yield loaded
    assert not [t for t in threading.enumerate() if t.name.startswith("specdec-draft")]


def drafted_ahead(stats: GenerationStats) -> bool:
    return stats.draft_ahead_hits + stats.draft_ahead_misses > 0


def tokens(llm: LLM) -> tuple[int, ...]:
    return llm.generate(PROMPT, max_tokens=N_TOKENS).token_ids


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    "step", [53, pytest.param(23, marks=pytest.mark.slow)], ids=lambda step: f"every {step}"
)
def test_interrupts_at_calls(llm: LLM, step: int) -> None:
    expected = tokens(llm)
    n_interrupted = 0
    for first in range(1, 100_000, step):
        then = None if first % 2 else 1 + first % 29
        with interrupted(first, then, FOLDERS) as interrupts:
            tokens(llm)
        assert tokens(llm) == expected, interrupts.places
        if not interrupts.places:
            break
        n_interrupted += 1
    assert n_interrupted > 1


@pytest.mark.slow
def test_signals_at_any_time(llm: LLM) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    expected = tokens(llm)
    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(100):
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.05))
                tokens(llm)
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert tokens(llm) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
