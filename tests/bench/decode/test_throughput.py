"""Tokens per second of many sequences: a run on tiny models, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_pair import save_model

from bench.checks.equal_outputs import OutputsDiffer
from bench.commands.app import main
from bench.decode.throughput import refuse_differences

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture
def argv(tmp_path: Path) -> list[str]:
    target = save_model(tmp_path / "target", seed=0)
    draft = save_model(tmp_path / "draft", seed=1, num_hidden_layers=2)
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}) for text in ("def f(x):", "import ", "class A:")]
    prompts.write_text("\n".join(lines))
    size = ["-c", "128", "-n", "6", "--prompts", str(prompts), "--ignore-eos"]
    return ["throughput", "-m", str(target), "-md", str(draft), *size]


def test_every_count_in_every_mode(argv: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert main([*argv, "--sequences", "1,3", "--output-file", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    modes = ("plain", "speculative")
    assert [(row["num_seqs"], row["mode"]) for row in rows] == [
        (n, mode) for n in (1, 3) for mode in modes
    ]
    assert [row["n_prompts"] for row in rows] == [2, 2, 3, 3]
    for row in rows:
        assert row["generated_tokens"] == 6 * row["n_prompts"]
        assert row["n_different_outputs"] == 0
        assert row["tokens_per_second"] > 0.0


def test_outputs_without_a_promise_may_differ(argv: list[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    lossy = ["--accept-threshold", "0.0001", "--num-draft-tokens", "4", "--output-file", str(path)]
    assert main([*argv, "--sequences", "1", *lossy]) == 0
    plain, speculative = json.loads(path.read_text())["rows"]
    assert speculative["n_different_outputs"] > 0
    assert not speculative["is_exact"]


def test_outputs_that_must_be_equal_are_refused_if_they_differ() -> None:
    rows = [
        {"n_different_outputs": 2, "is_exact": True},
        {"n_different_outputs": 1, "is_exact": False},
    ]
    with pytest.raises(OutputsDiffer, match="2 sequences differ"):
        refuse_differences(rows)
