"""`specdec-bench experts`: a run on the embedded mixture, and refusals."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from bench.commands.app import main
from bench.experts.depths import in_turns
from bench.experts.hits import measure, rules
from specdec.pair import pair_path

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = ["def area(r):", "import os\n"]


def test_a_mixture_that_fits_reads_every_expert_once() -> None:
    load = {"model": str(pair_path("pair:moe")), "memory_budget": "4GiB", "ctx_size": 128}
    actual = measure({"load": load, "prompts": PROMPTS, "max_tokens": 6})
    assert actual["n_slots"] == actual["n_experts"] == 6 * 64
    assert 0.0 < actual["hit_rate"] < 1.0  # the second prompt uses experts that the first did not
    for rate in ("own_rule", "least_recently_used", "belady"):
        assert 0.0 < actual[rate] <= actual["hit_rate"]  # replayed from an empty cache
    assert actual["own_rule"] == actual["belady"]
    assert [len(ids) for ids in actual["token_ids"]] == [6]
    assert actual["bytes_read"] > 0
    assert actual["bytes_per_read"] > 0


def test_rules_say_nothing_where_no_cache_was_asked() -> None:
    assert rules([], 8) == {}


@pytest.mark.slow
def test_the_command_measures_every_budget_in_a_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    argv = ["experts", "-m", "pair:moe", "--prompts", str(prompts), "--n-prompts", "2", "-n", "4"]
    assert main([*argv, "-c", "128", "--budgets", "2GiB,4GiB", "--output-file", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [row["memory_budget"] for row in result["rows"]] == [2 << 30, 4 << 30]
    first, second = result["rows"]
    assert first["token_ids"] == second["token_ids"]
    assert all(row["storage_bytes_per_second"] > 0 for row in result["rows"])
    assert all(row["predicted_tokens_per_second"] > 0 for row in result["rows"])
    assert "Belady" in capfd.readouterr().out


@pytest.mark.slow
def test_sizes_of_trees_alternate_and_give_the_same_outputs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    argv = ["experts", "-m", "pair:moe", "-md", "pair:draft", "--prompts", str(prompts), "-n", "6"]
    argv += ["--n-prompts", "2", "-c", "128", "--budgets", "2GiB", "--trees", "0,2,auto"]
    assert main([*argv, "--output-file", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["outputs_equal"]
    plain, pairs, _ = row["depths"]
    assert plain["tokens"] == plain["passes"] == 12
    assert pairs["passes"] < plain["passes"]
    assert pairs["experts_per_pass"] > plain["experts_per_pass"]
    assert "sequences equal" in capfd.readouterr().out


@pytest.mark.parametrize("n_prompts", [2, 3, 5])
def test_every_size_has_every_prompt_once(n_prompts: int) -> None:
    trees = [0, 1, 2, 4, 8, None]
    turns = list(in_turns(trees, n_prompts))
    assert len(set(turns)) == len(turns) == len(trees) * n_prompts
    # Except for the first of a turn, it follows another prompt's output.
    repeats = [i for i, (a, b) in enumerate(pairwise(turns), 1) if a[1] == b[1]]
    assert all(i % len(trees) == 0 for i in repeats)
