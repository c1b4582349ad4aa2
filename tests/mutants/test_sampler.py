"""Mistakes in the sampler and its noise: one written down from its definition tells every one."""

from __future__ import annotations

from types import ModuleType

import pytest
from definitions import sampler_is_defined
from mutants import is_caught, mutated

from specdec.sampling import gumbel, sampler

IN_NOISE = {
    "noise: the same at every position": ("np.array([seed, position]", "np.array([seed, 0]"),
    "noise: the same for every seed": ("np.array([seed, position]", "np.array([0, position]"),
    "noise: by rank, not by token": (
        "np.log(uniforms[ids - start])",
        "np.log(uniforms[: ids.size])",
    ),
    "noise: exponential": (
        "return -np.log(-np.log(uniforms[ids - start]))",
        "return -np.log(uniforms[ids - start])",
    ),
}
IN_SAMPLER = {
    "noise: of the next position": ("position=len(prefix))", "position=len(prefix) + 1)"),
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


def sampler_with(noise: ModuleType) -> type:
    """The sampler with the noise of this module."""
    copied = mutated(sampler, "gumbel_at(self.seed", "gumbel_at(self.seed")
    vars(copied)["gumbel_at"] = noise.gumbel_at
    changed: type = copied.Sampler
    return changed


@pytest.mark.parametrize("name", IN_NOISE)
def test_mutant_of_the_noise_is_caught(name: str) -> None:
    assert is_caught(gumbel, IN_NOISE[name], lambda m: sampler_is_defined(sampler_with(m)))


@pytest.mark.parametrize("name", IN_SAMPLER)
def test_mutant_of_the_sampler_is_caught(name: str) -> None:
    assert is_caught(sampler, IN_SAMPLER[name], lambda m: sampler_is_defined(m.Sampler))
