"""Output of the target as text to train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import train_options

import specdec
from specdec.run_options import RunOptions
from specdec.training.generated import generated_sequences, interleaved
from specdec.training.train import NoProgress, train_draft

LENGTH, PROMPT = 80, 40
DOCUMENTS = [np.random.default_rng(i).integers(3, 250, 70).tolist() for i in range(4)]


def generate(target: Path, folder: Path, minutes: float = 1.0, **options) -> list[list[int]]:
    run = RunOptions(target, memory_budget="2GiB", threads=1, parallel=2)
    return generated_sequences(run, DOCUMENTS, folder, length=LENGTH, minutes=minutes, **options)


def test_the_target_continues_beginnings(target, tmp_path) -> None:
    sequences = sorted(generate(target, tmp_path))
    prompts = [sequence[:PROMPT] for sequence in sequences]
    assert prompts == sorted(text[:PROMPT] for text in DOCUMENTS)
    assert all(len(sequence) <= LENGTH for sequence in sequences)
    with specdec.load(target, spec_type="none", memory_budget="2GiB", ctx_size=LENGTH) as llm:
        first = llm.generate(DOCUMENTS[0][:PROMPT], max_tokens=LENGTH - PROMPT)
    assert [*DOCUMENTS[0][:PROMPT], *first.token_ids] in sequences


def test_what_is_there_is_not_generated_again(target, tmp_path) -> None:
    sequences = generate(target, tmp_path)
    assert generate(tmp_path / "no model", tmp_path) == sequences


def test_an_interrupted_generation_goes_on(target, tmp_path) -> None:
    def interrupt(share: float) -> None:
        if share > 0:
            calls.append(share)
        if len(calls) == 4:
            raise KeyboardInterrupt

    calls: list[float] = []
    with pytest.raises(KeyboardInterrupt):
        generate(target, tmp_path, progress=interrupt)
    assert len(generate(target, tmp_path)) >= len(DOCUMENTS)


def test_no_time_is_no_output(target, tmp_path) -> None:
    assert generate(target, tmp_path, minutes=1e-9) == []


@pytest.mark.parametrize(("n_first", "n_second"), [(10, 3), (3, 10), (4, 4), (5, 0)])
def test_both_are_spread_evenly(n_first: int, n_second: int) -> None:
    first, second = [[0]] * n_first, [[1]] * n_second
    result = [ids[0] for ids in interleaved(first, second)]
    assert sorted(result) == [0] * n_first + [1] * n_second
    share = n_second / (n_first + n_second)
    for end in range(len(result)):
        assert abs(sum(result[:end]) - share * end) <= 1


def test_a_draft_learns_from_output(target, draft, text, tmp_path) -> None:
    class Counting(NoProgress):
        num_generated = 0

        def generated(self, share: float) -> None:
            self.num_generated += 1

    bar = Counting()
    options = train_options(target, tmp_path / "out", draft=str(draft), text=text, generate=0.05)
    report = train_draft(options, bar)
    plain = train_options(target, tmp_path / "plain", draft=str(draft), text=text)
    assert bar.num_generated > 1
    assert report.train_tokens > train_draft(plain).train_tokens
    assert report.after.agreement > report.before.agreement
