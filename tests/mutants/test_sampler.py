"""Mistakes in the sampler: one written down from its definition tells every one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from chain_checks import CAUGHT
from mutants import is_caught

from specdec.sampling import sampler as sampling
from specdec.sampling.params import SamplingParams

MISTAKES = {
    "noise: the same at every position": ("np.array([seed, position]", "np.array([seed, 0]"),
    "noise: the same for every seed": ("np.array([seed, position]", "np.array([0, position]"),
    "noise: of the next position": ("position=len(prefix))", "position=len(prefix) + 1)"),
    "noise: by rank, not by token": (
        "np.log(uniforms[ids - start])",
        "np.log(uniforms[: ids.size])",
    ),
    "noise: exponential": (
        "return -np.log(-np.log(uniforms[ids - start]))",
        "return -np.log(uniforms[ids - start])",
    ),
    "noise: subtracted": (".astype(np.float64) + noise)", ".astype(np.float64) - noise)"),
    "noise: left out": (".astype(np.float64) + noise)", ".astype(np.float64))"),
    "greedy with noise": (
        "        if self.is_greedy:\n            return int(scores.argmax())",
        "        if False:\n            return 0",
    ),
    "index among what is left, not a token": (
        "return int(alive[(scores[alive].astype(np.float64) + noise).argmax()])",
        "return int((scores[alive].astype(np.float64) + noise).argmax())",
    ),
    "padding rows": (
        "return np.asarray(logits, dtype=np.float32)[: self.n_tokens]",
        "return np.asarray(logits, dtype=np.float32)",
    ),
    "processors left out": ("scores = self._pipeline(prefix_ids, row)", "scores = row"),
    "processors do not see the last token": (
        "self._pipeline(prefix_ids, row)",
        "self._pipeline(prefix_ids[:-1], row)",
    ),
    "greedy p of the raw row": (
        "one_hot[int(self.scores(prefix_ids, logits).argmax())] = 1.0",
        "one_hot[int(logits[: self.n_tokens].argmax())] = 1.0",
    ),
    "p not normalised": ("np.asarray(p / p.sum())", "np.asarray(p / p.max())"),
    "p of the raw row": (
        "p = np.exp(self.log_probs(prefix_ids, logits))",
        "p = np.exp(logits.astype(np.float64))",
    ),
}


def reference_row(params: SamplingParams, prefix: tuple[int, ...], logits: np.ndarray) -> Any:
    """log p of the first six ids: penalty, temperature, top-k, as their definitions say."""
    row = logits[:6].astype(np.float64)
    for token in set(prefix):
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    if params.temperature:
        row /= params.temperature
        if params.top_k:
            row[row < np.sort(row)[-params.top_k]] = -np.inf
    peak = row.max()
    return row - peak - np.log(np.exp(row - peak).sum())


def sampler_is_defined(module: ModuleType) -> bool:
    """Choices and distributions, against log p + g of tables, penalty, temperature and seed."""
    rng = np.random.default_rng(8)
    all_params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=0.8, top_k=4, repetition_penalty=1.3, seed=5),
        SamplingParams(temperature=1.2, seed=2**63 + 1),
    ]
    for params in all_params:
        sampler = module.Sampler(params, n_tokens=6)
        for position in range(2, 40):
            logits = rng.normal(size=8).astype(np.float32) * 2  # two padding rows
            logits[6:] += 5.0
            prefix = tuple(int(t) for t in rng.integers(0, 3, size=position))
            log_p = reference_row(params, prefix, logits)
            key = np.array([sampler.seed, position], dtype=np.uint64)
            noise = -np.log(-np.log(np.random.Generator(np.random.Philox(key=key)).random(6)))
            wanted = int((log_p + (0.0 if params.is_greedy else noise)).argmax())
            choose = sampler.chooser(lambda node, p=prefix: p, lambda node, row=logits: row)
            if choose(0) != wanted:
                return False
            p = np.eye(8)[wanted] if params.is_greedy else np.append(np.exp(log_p), (0.0, 0.0))
            if not np.allclose(sampler.probs(prefix, logits), p, atol=CAUGHT):
                return False
    return True


def test_the_source_without_a_mistake_passes() -> None:
    assert sampler_is_defined(sampling)


@pytest.mark.parametrize("name", MISTAKES)
def test_mutant_is_caught(name: str) -> None:
    assert is_caught(sampling, MISTAKES[name], sampler_is_defined)
