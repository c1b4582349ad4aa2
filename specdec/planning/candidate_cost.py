"""Cost of ranking candidate tokens: a drafter's own work for each level of a tree."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute, ModelSource
from backends.timing.cached import cached_curve
from backends.timing.measure import Product, measure_curve
from specdec.config import SpecConfig
from specdec.drafters.candidates import SHARPNESS, CandidateRanker
from specdec.drafters.frontier import level_width
from specdec.policy.draft_policy import MAX_AUTO_NODES

_ROWS = (1, 8, level_width(MAX_AUTO_NODES))


@cache
def measure_candidates(n_tokens: int) -> ComputeCurve:
    """Return the seconds by rows of logits of `n_tokens`, measured once a month."""
    what = f"ranking, numpy {np.__version__}, {n_tokens} tokens {_ROWS}"
    return cached_curve(what, lambda: _time_ranking(n_tokens))


def _time_ranking(n_tokens: int) -> ComputeCurve:
    ranker = CandidateRanker(n_tokens, sharpness=SHARPNESS)
    logits = np.random.default_rng(0).standard_normal((_ROWS[-1], n_tokens), dtype=np.float32)
    width = min(SpecConfig().width, n_tokens)

    def ranking(num_tokens: int) -> Product:
        return lambda: ranker.rank(logits[:num_tokens], range(num_tokens), width)

    return measure_curve({n: ranking(n) for n in _ROWS}, 1)


def measure_draft(source: ModelSource) -> ModelCompute:
    """Measure one level of a tree: the draft model's pass, and the ranking of its logits."""
    passes = source.measure_compute(beside_reads=False)
    return replace(passes, per_pass=measure_candidates(source.vocab_size))
