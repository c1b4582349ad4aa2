"""Runs with both models on a device: the output equals that of the host.

The device is the fake one; with the mark `cuda` the same runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
from cpu_engine import CpuEngine
from device_talk import ENGINES, PROMPT, all_there, on_device
from generating import RandomDrafter, run

from backends.contract.backend import Backend
from backends.hf.backend import TorchBackend
from specdec.config import SpecConfig
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
    """Make a new engine: every model has its own."""
    return request.param


@pytest.fixture(autouse=True)
def _same_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock, since a policy uses measured times, which no two runs share: every call
    takes a second."""

    def policy(*args: Any) -> DraftPolicy:
        return DraftPolicy(*args, clock=count(0.0).__next__)

    monkeypatch.setattr("generating.DraftPolicy", policy)


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("drafting", ["model", "random", "lenient"])
def test_the_output_is_the_hosts(drafting, request_name, engine, checkpoint_factory) -> None:
    params = REQUESTS[request_name]
    is_lossy = drafting == "lenient"
    spec = replace(SPEC, accept_threshold=0.05 if is_lossy else None)
    path = checkpoint_factory("llama")
    with (
        TorchBackend.resident(path) as plain,
        TorchBackend.resident(path) as plain_draft,
        on_device(path, engine()) as target,
        on_device(path, item := engine(), all_there) as draft,
    ):
        if is_lossy and not isinstance(item, CpuEngine):
            pytest.skip("a lossy text depends on the tree, and so on the last bits of its chances")
        if drafting == "random":
            token_ids = run(target, PROMPT, 24, RandomDrafter(VOCAB), params, spec=SPEC)
            expected = run(plain, PROMPT, 24, params=params)
        else:
            token_ids = run(target, PROMPT, 24, drafter(draft, params), params, spec=spec)
            host = drafter(plain_draft, params) if is_lossy else None
            expected = run(plain, PROMPT, 24, host, params, spec=spec)
    assert token_ids == expected


def drafter(draft: Backend, params: SamplingParams) -> ModelDrafter:
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=VOCAB), VOCAB)
    return ModelDrafter(draft, VOCAB, ranker=ranker)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_those_of_the_host(rule, engine, checkpoint_factory) -> None:
    """Chains are drawn from the same rows with the same random numbers."""
    spec = SpecConfig(("draft",), num_draft_tokens=5, acceptance=rule)
    params = SamplingParams(temperature=0.9, seed=4)
    target_path, draft_path = (checkpoint_factory("llama", seed=seed) for seed in (0, 1))
    sequences = []
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
            sequences.append(run(backends[0], PROMPT, 24, made, params, spec=spec, rng=rng))
    assert sequences[0] == sequences[1]
