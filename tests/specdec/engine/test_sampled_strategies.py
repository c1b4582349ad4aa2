"""Every sampled strategy has exactly the distribution of `transformers.generate` in fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from reference_decoding import PROMPT, config_of
from scipy import stats
from tiny_pair import VOCAB
from transformers import GenerationConfig

from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

SAMPLED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top-k": {"temperature": 0.8, "top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.15},
    "typical": {"typical_p": 0.6},
    "top-h": {"top_h": 0.5},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "penalised": {"top_k": 8, "repetition_penalty": 1.5, "suppress_tokens": [4, 5, 6]},
}
BEAM_SAMPLED = {"temperature": 0.2, "top_k": 6, "num_beams": 2, "max_new_tokens": 3}
N_DRAWS = 400
REJECT_BELOW = 1e-6  # our seeds are fixed: a correct sampler always passes


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_strategies_have_generates_distribution(name, reference_model, resident):
    """Pairs of the first two tokens: their exact chances from the model's own probabilities.

    The chances come from `generate`'s processed scores, so that every processor is transformers'.
    """
    config = config_of(
        {"do_sample": True, "max_new_tokens": 2, "eos_token_id": [], **SAMPLED[name]}
    )
    chances = exact_pairs(reference_model, config)
    params = SamplingParams.from_generation_config(config)
    counts: dict[tuple[int, ...], int] = dict.fromkeys(chances, 0)
    rows = {(): first_row(resident.target)}
    for seed in range(N_DRAWS):
        pair = draw_pair(resident.target, params.replace(seed=seed), rows)
        counts[pair] += 1  # KeyError: an impossible pair
        if seed % 100 == 0:  # as a generation does with the same seed
            assert resident.generate(PROMPT, params, seed=seed).token_ids == pair
    likely = sorted(chances, key=lambda pair: -chances[pair])
    likely = [pair for pair in likely if chances[pair] * N_DRAWS >= 5]
    rest = 1.0 - sum(chances[pair] for pair in likely)
    observed = [counts[pair] for pair in likely]
    expected = [chances[pair] * N_DRAWS for pair in likely]
    if rest * N_DRAWS > 1e-6:
        observed.append(N_DRAWS - sum(observed))
        expected.append(rest * N_DRAWS)
    if len(observed) > 1:
        assert stats.chisquare(observed, expected).pvalue > REJECT_BELOW


@pytest.mark.slow
def test_beam_sampling_has_generates_distribution(reference_model, resident):
    """The better of two beams is as frequent as in transformers, which draws in a batch."""
    config = config_of({"do_sample": True, "eos_token_id": [], **BEAM_SAMPLED})
    torch.manual_seed(0)
    drawn = reference_model.generate(torch.tensor([PROMPT] * 2000), generation_config=config)
    theirs = Counter(map(tuple, drawn[:, len(PROMPT) :].tolist()))
    params = SamplingParams.from_generation_config(config)
    ours = Counter(
        resident.generate(PROMPT, params, seed=seed).token_ids for seed in range(N_DRAWS // 2)
    )
    often = [tokens for tokens, n in theirs.items() if n >= 25]
    assert len(often) > 3
    table = [
        [
            *(counts[item] for item in often),
            sum(n for item, n in counts.items() if item not in often),
        ]
        for counts in (ours, theirs)
    ]
    assert stats.chi2_contingency(table).pvalue > REJECT_BELOW


def first_row(target) -> np.ndarray:
    own(target).rollback(0)
    return own(target).prefill(PROMPT)


def draw_pair(target, params: SamplingParams, rows: dict) -> tuple[int, ...]:
    """Draw two tokens; rows of logits are computed once for each prefix."""
    sampler = Sampler(params, n_tokens=VOCAB, prompt_length=len(PROMPT))
    tokens: tuple[int, ...] = ()
    while len(tokens) < 2:
        if tokens not in rows:
            own(target).rollback(0)
            rows[tokens] = own(target).prefill([*PROMPT, *tokens])
        prefix = [*PROMPT, *tokens]
        tokens = (*tokens, sampler.choose(prefix, rows[tokens], position=len(prefix)))
    return tokens


def exact_pairs(model, config: GenerationConfig) -> dict[tuple[int, ...], float]:
    item = GenerationConfig(
        **{**config.to_diff_dict(), "output_scores": True, "return_dict_in_generate": True}
    )
    item.max_new_tokens = 1

    def next_probs(prompts: list[list[int]]) -> np.ndarray:
        with torch.no_grad():
            scores = model.generate(torch.tensor(prompts), generation_config=item).scores[0]
        return scores.double().softmax(-1).numpy()

    first = next_probs([PROMPT])[0]
    alive = np.flatnonzero(first).tolist()
    second = next_probs([[*PROMPT, token] for token in alive])
    return {
        (item, int(two)): float(first[item] * row[two])
        for item, row in zip(alive, second, strict=True)
        for two in np.flatnonzero(row)
    }
