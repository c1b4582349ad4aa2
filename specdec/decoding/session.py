"""The parts of an LLM put together for one sequence: its drafters and its controller."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.contract.backend import Backend
from specdec.config import SpecConfig
from specdec.decoding.controller import Controller, NoDrafter
from specdec.decoding.recorder import StatsRecorder
from specdec.drafters.base import Drafter
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

if TYPE_CHECKING:
    from specdec.api import LLM

_CHAIN_STREAM = 2**64 - 1
"""Key word of the chain rules' random numbers; positions, the match rule's, never get there."""


def make_controller(
    llm: LLM,
    target: Backend,
    sampler: Sampler,
    params: SamplingParams,
    spec: SpecConfig,
    recorder: StatsRecorder,
    drafter: Drafter | None = None,
) -> Controller:
    """The loop of one sequence.

    Args:
        target: the LLM's, or a stand-in that watches it.
        sampler: the sequence's, with its own seed.
        drafter: of the caller's own, instead of those that `spec` names.
    """
    if drafter is not None:
        drafter.reset()
    rng = np.random.Generator(
        np.random.Philox(key=np.array([sampler.seed, _CHAIN_STREAM], dtype=np.uint64))
    )
    return Controller(
        target,
        drafter or _make_drafter(llm, spec, sampler, rng),
        sampler,
        llm.policy(spec, params.temperature),
        recorder=recorder,
        ahead=llm.ahead,
        acceptance=spec.acceptance,
        accept_threshold=spec.accept_threshold,
        rng=rng,
        wants_logprobs=bool(params.logprobs),
    )


def _make_drafter(
    llm: LLM, spec: SpecConfig, sampler: Sampler, rng: np.random.Generator
) -> Drafter:
    drafters: list[Drafter] = []
    if "draft" in spec.drafters and llm.draft is not None:
        chain = (sampler, rng) if spec.draws_chains else None
        n_tokens = min(sampler.n_tokens, llm.draft.vocab_size)
        ranker = CandidateRanker.for_target(sampler, n_tokens)
        window = llm.draft_window
        drafters.append(
            ModelDrafter(llm.draft, n_tokens, chain=chain, ranker=ranker, window=window)
        )
    if "ngram" in spec.drafters:
        ngram = llm.ngram_drafter()
        ngram.reset()  # a model's drafter finds by itself what its cache holds of the context
        drafters.append(ngram)
    if not drafters:
        return NoDrafter()
    return drafters[0] if len(drafters) == 1 else MergedDrafter(drafters)
