"""eval_results.json of drafts: what is written is read, and other files say nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.models.eval_results import (
    EVAL_RESULTS,
    EvalResults,
    read_eval_results,
    write_eval_results,
)
from specdec.models.names import resolve_model
from specdec.models.weight_files import weights_fingerprint
from specdec.pair import PAIR_HEAD_NAMES

RESULTS = EvalResults(0.6, 2.7, 8, 1000, ("src", "notes.txt"), "my-model", "0123456789abcdef")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_eval_results(tmp_path, RESULTS)
    assert read_eval_results(tmp_path) == RESULTS


@pytest.mark.parametrize(
    "change",
    [
        {"agreement": 1.5},
        {"tokens_per_pass": 0.5},
        {"tokens_per_pass": 9.5},
        {"tokens_per_pass": "2.7"},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": True},
        {"target_fingerprint": None},
        {"agreement": float("nan")},
    ],
)
def test_impossible_figures_are_ignored(tmp_path: Path, change: dict[str, Any]) -> None:
    write_eval_results(tmp_path, RESULTS)
    path = tmp_path / EVAL_RESULTS
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert read_eval_results(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"eval_loss": 2.1}', "[" * 100_000, "\0"])
def test_other_files_say_nothing(tmp_path: Path, text: str) -> None:
    assert read_eval_results(tmp_path) is None
    (tmp_path / EVAL_RESULTS).write_text(text)
    assert read_eval_results(tmp_path) is None


@pytest.mark.parametrize("name", PAIR_HEAD_NAMES)
def test_embedded_heads_name_their_target_and_the_figures_of_their_card(name: str) -> None:
    path = resolve_model(name)
    results = read_eval_results(path)
    assert results is not None
    assert results.target_fingerprint == weights_fingerprint(resolve_model(results.target))
    card = (path / "README.md").read_text(encoding="utf-8")
    assert f"| {results.agreement:.3f} on" in card
    assert f"| {results.tokens_per_pass:.2f} on" in card
