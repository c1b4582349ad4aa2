"""Traces that runs leave: exactly the run's tokens, and the target's likeliest after each."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import specdec
from specdec.sampling.logprobs import log_probs_of
from specdec.sampling.params import SamplingParams
from specdec.traces.format import read_index
from specdec.traces.reader import Traces

PROMPTS = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:", "# a"]
OPTIONS = {"memory_budget": "1GiB", "ctx_size": 256, "draft_model": "pair:draft"}


def record(folder: Path, params: SamplingParams, **options) -> list[list[int]]:
    """Return prompt and output of each sequence of a run that leaves traces."""
    with specdec.load("pair:target", record_traces=folder, **OPTIONS, **options) as llm:
        sequences = []
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            ids = llm.tokenizer.encode(prompt)
            sequences += [[*ids, *output.token_ids] for output in result.outputs]
        return sequences


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=3, n=2),
        SamplingParams(max_tokens=30, stop=("return",)),
    ],
    ids=["greedy", "sampled", "stop"],
)
def test_traces_have_the_runs_tokens_and_the_targets_likeliest(tmp_path, params) -> None:
    sequences = record(tmp_path, params)
    traces = Traces(tmp_path)
    actual = [traces.token_ids(i).tolist() for i in range(len(traces))]
    assert sorted(actual) == sorted(sequences)
    k = traces.header.top_k
    with specdec.load("pair:target", **{**OPTIONS, "draft_model": None}) as llm:
        for number, ids in enumerate(actual):
            rows, top = traces.rows(number), traces.top(number)
            assert rows.tolist() == list(range(rows[0], len(ids) - 1))
            for row in (0, len(rows) // 2, len(rows) - 1):
                expected = log_probs_of(logits_after(llm, ids[: rows[row] + 1]))
                assert top.ids[row].tolist() == np.argsort(-expected, kind="stable")[:k].tolist()
                np.testing.assert_allclose(top.logprobs[row], expected[top.ids[row]], atol=0.02)


def logits_after(llm: specdec.LLM, token_ids: list[int]) -> np.ndarray:
    def compute() -> np.ndarray:
        kv = llm.target.new_sequence()
        row = kv.prefill(token_ids)
        kv.close()
        return row

    return llm.session.engine.call(compute)


def test_the_first_row_is_the_prompts_last_token(tmp_path) -> None:
    (first, *_) = record(tmp_path, SamplingParams(max_tokens=5, ignore_eos=True))
    traces = Traces(tmp_path)
    number = next(i for i in range(3) if traces.token_ids(i).tolist() == first)
    assert len(traces.rows(number)) == 5
    assert traces.rows(number)[0] == len(first) - 6
    greedy = traces.top(number).ids[:, 0].tolist()
    assert greedy == first[-5:]


def test_a_full_folder_ends_the_recording_and_not_the_run(tmp_path, caplog) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        sequences = record(tmp_path, params, max_traces=9000)
    assert all(len(ids) > 20 for ids in sequences)
    index = read_index(tmp_path)
    assert 0 < index.n_sequences < 3
    assert index.n_bytes <= 9000
    assert len([r for r in caplog.records if "has reached its limit" in r.message]) == 1


def test_a_folder_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(specdec.SpecdecError, match="cannot write traces"):
        specdec.load("pair:target", record_traces=tmp_path / "file" / "t", **OPTIONS)
