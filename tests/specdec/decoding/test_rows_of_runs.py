"""Runs with rows that stay on a device: only those on the walk are brought; the text is the same.

The device is the fake one; with the mark `cuda` the same runs on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from cpu_engine import CpuEngine
from device_talk import ENGINES, PROMPT, all_there, on_device
from generating import RandomDrafter, SteppedAhead, make_controller, run
from graph_tape import AlwaysGraphs, GraphTape

from backends.contract.backend import Backend
from backends.cuda.rows import DeviceRows
from backends.hf.backend import TorchBackend
from specdec.config import SpecConfig
from specdec.decoding.beams import BeamDecoder
from specdec.drafters.base import TreeLimits
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.model import ModelDrafter
from specdec.policy.draft_policy import DraftPolicy
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

VOCAB = 96
SPEC = SpecConfig(num_draft_tokens=12, draft_depth=6)
REQUESTS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=5),
    "filtered": SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, seed=6),
}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a new one: every model has its own."""
    return request.param


@pytest.fixture(autouse=True)
def _same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy goes by measured times, which no two runs share: here every look at the clock takes
    a second."""

    def policy(*args: Any) -> DraftPolicy:
        return DraftPolicy(*args, clock=count(0.0).__next__)

    monkeypatch.setattr("generating.DraftPolicy", policy)


class Noted(DeviceRows):
    """Rows that are counted: which are brought, and how many passes' are alive together."""

    brought: list[int] = []
    alive: weakref.WeakSet[Noted] = weakref.WeakSet()
    most_alive = 0

    def __init__(self, on_device: torch.Tensor, computing: Any) -> None:
        super().__init__(on_device, computing)
        Noted.alive.add(self)
        Noted.most_alive = max(Noted.most_alive, len(Noted.alive))

    def __getitem__(self, index: int, /) -> np.ndarray:
        Noted.brought.append(index)
        return super().__getitem__(index)

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray:
        raise AssertionError("all rows were brought at once")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    gc.collect()
    Noted.brought, Noted.alive, Noted.most_alive = [], weakref.WeakSet(), 0
    monkeypatch.setattr("backends.cuda.weights.DeviceRows", Noted)
    return Noted


def test_only_rows_on_the_walk_are_brought(noted, engine, checkpoint_factory) -> None:
    directory = checkpoint_factory("llama")
    with TorchBackend.resident(directory) as draft, on_device(directory, engine()) as target:
        controller = make_controller(target, ModelDrafter(draft, VOCAB), spec=SPEC)
        controller.start(PROMPT)
        n_accepted = 0
        for _ in range(5):
            noted.brought.clear()
            step = controller.step(20)
            assert len(step.tree) > len(step.acceptance.path)
            assert noted.brought == list(step.acceptance.path)
            assert not noted.alive  # nor is there any on the device
            n_accepted += step.acceptance.n_accepted
    assert n_accepted > 5


def test_of_a_draft_only_the_prompts_row_is_brought(noted, engine, checkpoint_factory) -> None:
    directory = checkpoint_factory("llama")
    with on_device(directory, engine(), all_there, cache_rows=512) as draft:
        tree = ModelDrafter(draft, VOCAB).propose(PROMPT, TreeLimits(40, 6, 4))
        assert tree.n_runs > 2
    assert noted.brought == [0]
    assert noted.most_alive == 1


def test_beams_let_go_of_their_rows_before_the_next_pass(noted, engine, checkpoint_factory) -> None:
    params = SamplingParams(num_beams=4, logprobs=True)
    sampler = Sampler(params, n_tokens=VOCAB)
    found = []
    with (
        TorchBackend.resident(checkpoint_factory("llama")) as plain,
        on_device(checkpoint_factory("llama"), engine()) as target,
    ):
        for backend in (plain, target):
            decoder = BeamDecoder(backend, sampler, PROMPT, 12)
            decoder.start()
            while not decoder.is_over:
                decoder.step()
                assert not noted.alive
            found.append([one.token_ids for one, _ in decoder.results(4)])
    assert found[0] == found[1]
    assert noted.most_alive == 1


def test_each_model_holds_the_rows_of_one_pass(noted, engine, checkpoint_factory) -> None:
    """Memory is set aside for those. Trees, levels run ahead, chains."""
    directory, spec = checkpoint_factory("llama"), replace(SPEC, draft_ahead="on")
    params = REQUESTS["sampled"]
    with (
        on_device(directory, engine()) as target,
        on_device(directory, engine(), all_there) as draft,
    ):
        ahead = SteppedAhead([3] * 24)
        run(target, PROMPT, 24, drafter(draft, params), params, spec=spec, ahead=ahead)
        assert noted.most_alive == 1  # no pass runs beside another one here
        noted.most_alive = 0
        chain = (Sampler(params, n_tokens=VOCAB), np.random.default_rng(1))
        draft.rollback(0)
        tree = ModelDrafter(draft, VOCAB, chain=chain).propose(PROMPT, TreeLimits(5, 5, 1))
        assert tree.n_drafted == 5
        assert noted.most_alive == 1


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("drafting", ["model", "recorded", "random", "lenient"])
def test_the_text_is_the_hosts(drafting, request_name, engine, checkpoint_factory) -> None:
    params = REQUESTS[request_name]
    is_lossy = drafting == "lenient"
    spec = replace(SPEC, accept_threshold=0.05 if is_lossy else None)
    path = checkpoint_factory("llama")
    with (
        TorchBackend.resident(path) as plain,
        TorchBackend.resident(path) as plain_draft,
        on_device(path, engine()) as target,
        on_device(path, one := engine(), all_there, cache_rows=512) as draft,
    ):
        if is_lossy and not isinstance(one, CpuEngine):
            pytest.skip("a lossy text depends on the tree, and so on the last bits of its chances")
        if drafting == "recorded":
            draft.use_static_passes(GraphTape() if isinstance(one, CpuEngine) else AlwaysGraphs())
        if drafting == "random":
            text = run(target, PROMPT, 24, RandomDrafter(VOCAB), params, spec=SPEC)
            expected = run(plain, PROMPT, 24, params=params)
        else:
            text = run(target, PROMPT, 24, drafter(draft, params), params, spec=spec)
            host = drafter(plain_draft, params) if is_lossy else None
            expected = run(plain, PROMPT, 24, host, params, spec=spec)
    assert text == expected


def drafter(draft: Backend, params: SamplingParams) -> ModelDrafter:
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=VOCAB), VOCAB)
    return ModelDrafter(draft, VOCAB, ranker=ranker)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_those_of_the_host(rule, engine, checkpoint_factory) -> None:
    """Drawn from the same rows with the same random numbers."""
    spec = SpecConfig(("draft",), num_draft_tokens=5, acceptance=rule)
    params = SamplingParams(temperature=0.9, seed=4)
    target_path, draft_path = (checkpoint_factory("llama", seed=seed) for seed in (0, 1))
    texts = []
    with (
        TorchBackend.resident(target_path) as plain,
        TorchBackend.resident(draft_path) as plain_draft,
        on_device(target_path, engine()) as target,
        on_device(draft_path, engine(), all_there) as draft,
    ):
        for backends in ((plain, plain_draft), (target, draft)):
            rng = np.random.default_rng(7)
            chain = (Sampler(params, n_tokens=VOCAB), rng)
            made = ModelDrafter(backends[1], VOCAB, chain=chain)
            texts.append(run(backends[0], PROMPT, 24, made, params, spec=spec, rng=rng))
    assert texts[0] == texts[1]
