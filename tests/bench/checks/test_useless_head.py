"""A head with random weights: what it costs, counted in runs of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.checks import useless_head
from specdec.planning import saved_statistics

TOKENS = 256


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("spec_type", ["draft,ngram", "draft"])
def test_it_is_hardly_run(tmp_path: Path, spec_type: str, temperature: float) -> None:
    """Beside n-grams, whose tokens are accepted, it used to be run in every pass. The policy learns
    from measured times, so that a busy machine is given three tries."""
    head = useless_head.save_random_head("pair:target", tmp_path)
    load = {"model": "pair:target", "draft_model": head, "spec_type": spec_type, "threads": 1}
    sampling = {"max_tokens": TOKENS, "temperature": temperature, "ignore_eos": True, "seed": 1}
    prompts = ["def fibonacci(n):\n    ", "import os\n\n\nclass Reader:\n    def __init__(self"]
    for _ in range(3):
        result = useless_head.run({**load, "memory_budget": "2GiB"}, prompts, sampling)
        assert result["head_runs"] >= 1
        limit = min(0.2 * result["passes"], 0.1 * TOKENS * len(prompts))
        if result["head_runs"] < limit:
            return
    pytest.fail(f"{result['head_runs']} runs of the head in {result['passes']} passes, thrice")


def test_the_check_prints_what_it_costs(capsys) -> None:
    before = saved_statistics.cache_folder
    argv = ["-m", "pair:target", "--memory-budget", "2GiB", "--n-prompts", "1", "-n", "8"]
    useless_head.app([*argv, "--rounds", "1", "--limit", "1"], standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    result = json.loads(line)
    for name in ("n-grams", "plain", "n-grams, second load"):
        assert result[name]["n_different"] == 0
        assert result[name]["loss"] < 1
        assert len(result[name]["head_runs"]) == 1
    assert saved_statistics.cache_folder is before


def test_a_costly_head_is_an_error(monkeypatch) -> None:
    speeds = iter([10.0, 9.0] * 3)

    def fake(*_: object) -> dict:
        return {"tokens_per_second": next(speeds), "passes": 1, "head_runs": 1, "token_ids": [[1]]}

    monkeypatch.setattr(useless_head, "run", fake)
    monkeypatch.setattr(useless_head, "save_random_head", lambda model, folder: folder)
    with pytest.raises(useless_head.CostlyHead, match=r"costs 10\.0% against n-grams"):
        useless_head.app(["-m", "pair:target", "--rounds", "1"], standalone_mode=False)


def test_one_comparison_can_be_chosen(monkeypatch, capsys) -> None:
    result = {"tokens_per_second": 10.0, "passes": 1, "head_runs": 1, "token_ids": [[1]]}
    monkeypatch.setattr(useless_head, "run", lambda *_: result)
    monkeypatch.setattr(useless_head, "save_random_head", lambda model, folder: folder)
    argv = ["-m", "pair:target", "--rounds", "1", "--against", "plain"]
    useless_head.app(argv, standalone_mode=False)
    printed = capsys.readouterr()
    assert "n-grams" not in printed.out + printed.err
    assert "plain, with the head: 10.00 tokens/s" in printed.err
