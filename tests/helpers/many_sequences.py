"""Sequences in shared passes, and the output of each of them alone."""

from __future__ import annotations

from typing import Any

from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.sampling.params import SamplingParams

LONG = [7 + i % 60 for i in range(70)]
PROMPTS = [[5, 6, 7], [5, 6, 7, 8], LONG, [*LONG[:40], 9], [80, 81], [*LONG, 3, 4]]
N_TOKENS = 12
_ALONE: dict[Any, tuple[int, ...]] = {}


def params(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=N_TOKENS, temperature=temperature, seed=3, ignore_eos=True, **more
    )


def alone(llm: LLM, request: tuple[int, float, str | None]) -> tuple[int, ...]:
    """Return the output of plain decoding alone, computed without cache."""
    number, temperature, _ = request
    if (number, temperature) not in _ALONE:
        result = llm.generate(
            PROMPTS[number], params(temperature), speculative=False, cache_prompt=False
        )
        _ALONE[number, temperature] = result.token_ids
    return _ALONE[number, temperature]


def load(tmp: Any, **more: Any) -> LLM:
    target = save_model(tmp.mktemp("target"), seed=0)
    draft = save_model(tmp.mktemp("draft"), seed=0, num_hidden_layers=2)
    size = {"num_draft_tokens": 6, "draft_depth": 3, "ctx_size": 128}
    return specdec.load(target, draft, **{**size, **more})
