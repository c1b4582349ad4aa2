"""Training of a draft model: it gets better, goes on where it stopped, and is refused if worse."""

from __future__ import annotations

import json

import pytest
import torch
from training import train_options, weights_of

import specdec
from specdec.models.eval_results import read_eval_results
from specdec.models.weight_files import weights_fingerprint
from specdec.training.options import TrainError
from specdec.training.train import NoProgress, train_draft
from specdec.training.trainer import Schedule


class Interrupting(NoProgress):
    """Ctrl-C at a share of the training, or of the target's passes."""

    def __init__(self, at_training: float = 2.0, at_scoring: float = 2.0) -> None:
        self.at_training, self.at_scoring = at_training, at_scoring
        self.num_scored = 0

    def scored(self, done: int, total: int) -> None:
        self.num_scored += 1
        if done / total >= self.at_scoring:
            raise KeyboardInterrupt

    def trained(self, share: float, loss: float, seconds: float) -> None:
        if share >= self.at_training:
            raise KeyboardInterrupt


def test_agreement_rises_and_the_draft_is_used(target, draft, text, tmp_path) -> None:
    report = train_draft(train_options(target, tmp_path / "out", draft=str(draft), text=text))
    assert report.after.agreement > report.before.agreement + 0.05
    assert report.after.tokens_per_pass > report.before.tokens_per_pass
    assert 1 <= report.before.tokens_per_pass <= 9
    assert report.after.n_tokens + report.train_tokens > 5000
    assert not (tmp_path / "out" / "training").exists()
    results = read_eval_results(tmp_path / "out")
    assert results is not None
    measured = report.after
    assert results.agreement == measured.agreement
    assert results.tokens_per_pass == measured.tokens_per_pass
    assert (results.num_draft_tokens, results.num_tokens) == (8, measured.n_tokens)
    assert results.text == (text.name,)
    assert results.target_fingerprint == weights_fingerprint(target)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((draft / "config.json").read_text())
    dtypes = {tensor.dtype for tensor in weights_of(tmp_path / "out").values()}
    assert dtypes == {torch.float32}  # as the draft's
    options = {"memory_budget": "2GiB", "ctx_size": 128}
    with specdec.load(target, spec_type="none", **options) as llm:
        expected = llm.generate("int char ", max_tokens=12).token_ids
    with specdec.load(target, tmp_path / "out", spec_type="draft", **options) as llm:
        assert llm.generate("int char ", max_tokens=12).token_ids == expected


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_continued_training_has_the_same_weights(target, draft, text, tmp_path, share) -> None:
    whole = train_options(target, tmp_path / "whole", draft=str(draft), text=text)
    train_draft(whole)
    parts = train_options(target, tmp_path / "parts", draft=str(draft), text=text)
    with pytest.raises(KeyboardInterrupt):
        train_draft(parts, Interrupting(at_training=share))
    assert not (tmp_path / "parts" / "config.json").exists()
    resumed = Interrupting()
    report = train_draft(parts, resumed)
    assert resumed.num_scored == 0  # the target is not needed again
    assert report.after.agreement > report.before.agreement
    expected, actual = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_the_targets_passes_are_not_repeated(target, draft, text, tmp_path) -> None:
    options = train_options(target, tmp_path / "out", draft=str(draft), text=text)
    with pytest.raises(KeyboardInterrupt):
        train_draft(options, Interrupting(at_scoring=0.4))
    rest = Interrupting()
    train_draft(options, rest)
    whole = Interrupting()
    train_draft(train_options(target, tmp_path / "whole", draft=str(draft), text=text), whole)
    assert 0 < rest.num_scored < whole.num_scored


def test_other_options_do_not_continue(target, draft, text, tmp_path) -> None:
    options = train_options(target, tmp_path, draft=str(draft), text=text)
    with pytest.raises(KeyboardInterrupt):
        train_draft(options, Interrupting(at_training=0.5))
    changed = train_options(target, tmp_path, draft=str(draft), text=text, learning_rate=0.1)
    with pytest.raises(TrainError, match=r"unfinished training with another learning_rate \(0.02"):
        train_draft(changed)


def test_a_worse_draft_is_not_written(target, text, tmp_path) -> None:
    """The draft is a copy of the target, so any training can only make it worse."""
    import shutil

    copy = shutil.copytree(target, tmp_path / "copy")
    options = train_options(target, tmp_path / "out", draft=str(copy), text=text, learning_rate=1.0)
    with pytest.raises(
        TrainError, match=r"[89]\.\d+ tokens per pass before and 1.* agreement (0\.9|1\.0)"
    ):
        train_draft(options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["training"]
    other = train_options(
        target, tmp_path / "out", draft=str(copy), text=text, learning_rate=1e-9, epochs=0.1
    )
    again = Interrupting()
    train_draft(other, again)  # the traces are used with other options
    assert again.num_scored == 0


def test_traces_of_runs_are_trained_on(target, draft, tmp_path) -> None:
    options = {"memory_budget": "2GiB", "ctx_size": 256}
    with specdec.load(target, record_traces=tmp_path / "traces", **options) as llm:
        for seed in range(12):
            llm.generate("int x", max_tokens=100, temperature=0.3, seed=seed, ignore_eos=True)
    traces = tmp_path / "traces"
    options = train_options(target, tmp_path / "out", draft=str(draft), traces=traces, epochs=30.0)
    report = train_draft(options)
    assert report.after.agreement > report.before.agreement
    assert report.after.n_tokens == 200  # generated tokens of the two last runs


def test_the_schedule_follows_steps_or_time_whichever_is_further() -> None:
    schedule = Schedule(max_steps=100, minutes=1.0, learning_rate=1.0)
    assert schedule.progress(50, 6.0) == 0.5
    assert schedule.progress(50, 54.0) == 0.9
    assert schedule.progress(3, 70.0) == 1.0
    rates = [schedule.rate(step, 0.0) for step in range(100)]
    assert rates[:20] == sorted(rates[:20])
    assert rates[25:] == sorted(rates[25:], reverse=True)
    assert 0.04 < rates[-1] < 0.06
