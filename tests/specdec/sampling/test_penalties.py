"""Presence and frequency penalties by OpenAI's formula, biases of tokens, and their order."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.checks import ConfigError
from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.sampler import Sampler

PROMPT = [1, 2, 2]
ROW = np.array([1.0, -2.0, 3.0, 0.5, -0.25, 2.0], dtype=np.float32)


def processed(prefix: list[int], **options) -> np.ndarray:
    return LogitsPipeline(SamplingParams(**options), prompt_length=len(PROMPT))(prefix, ROW)


def test_each_occurrence_in_the_new_text_costs_the_frequency_penalty() -> None:
    scores = processed([*PROMPT, 4, 5, 4, 4], frequency_penalty=0.5)
    assert scores.tolist() == [1.0, -2.0, 3.0, 0.5, -0.25 - 3 * 0.5, 2.0 - 0.5]


def test_any_occurrence_in_the_new_text_costs_the_presence_penalty_once() -> None:
    scores = processed([*PROMPT, 4, 5, 4, 4], presence_penalty=-1.5)
    assert scores.tolist() == [1.0, -2.0, 3.0, 0.5, -0.25 + 1.5, 2.0 + 1.5]


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_the_prompt_is_not_punished(name: str) -> None:
    assert np.array_equal(processed(PROMPT, **{name: 2.0}), ROW)


@pytest.mark.parametrize("token_id", [len(ROW), 99])
def test_ids_beyond_the_row_are_no_candidates(token_id: int) -> None:
    scores = processed([*PROMPT, token_id], frequency_penalty=1.0, presence_penalty=1.0)
    assert np.array_equal(scores, ROW)


def test_a_bias_is_added_to_its_token() -> None:
    scores = processed(PROMPT, logit_bias={0: 2.5, 5: -100})
    assert scores.tolist() == [3.5, -2.0, 3.0, 0.5, -0.25, -98.0]


def test_biases_come_first_then_repetition_then_frequency_and_presence() -> None:
    """llama.cpp's and vLLM's order; the sum of a token biased above 0 is divided."""
    scores = processed(
        [*PROMPT, 4],
        logit_bias={4: 4.25},
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert scores[4] == (-0.25 + 4.25) / 2.0 - 0.25 - 0.5


def test_the_row_stays_as_it_is() -> None:
    before = ROW.copy()
    processed([*PROMPT, 1], logit_bias={1: 1.0}, frequency_penalty=1.0, presence_penalty=1.0)
    assert np.array_equal(ROW, before)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [-2.1, 2.1, float("nan"), "1", True])
def test_penalties_are_from_minus_2_to_2(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "bias", [{-1: 1.0}, {1: float("nan")}, {1: float("inf")}, {"a": 1.0}, 5, {1: 1e9}]
)
def test_a_bias_has_a_token_and_a_finite_size(bias: object) -> None:
    with pytest.raises(ConfigError, match="logit_bias|shape"):
        SamplingParams(logit_bias=bias)


def test_a_bias_of_no_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="logit_bias holds token id 6"):
        Sampler(SamplingParams(logit_bias={6: 1.0}), n_tokens=6)
