"""Several budgets: rows, equal texts, and what is said of a process that the kernel killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from bench.commands.app import main
from bench.decode import budgets
from bench.process.child import KILLED
from bench.process.results import BUDGETS, read_results
from bench.prompts.workloads import Prompt
from specdec.cli.errors import EXIT_INTERRUPTED

PLAN = {"streamed_bytes_per_pass": 10**9}
PROMPTS = [Prompt("a", "x"), Prompt("b", "y")]


def record(prompt: str, tokens: list[int]) -> dict[str, object]:
    from specdec.decoding.recorder import StatsRecorder

    stats = StatsRecorder(prompt_tokens=1).finish(
        bytes_streamed=0,
        stall_seconds=0.0,
        peak_memory_bytes=2**30,
        memory_budget_bytes=2**31,
        kv_bytes=0,
        kv_used_fraction=0.0,
    )
    return {
        "prompt": prompt,
        "mode": "speculative",
        "token_ids": tokens,
        "stats": stats.to_dict(),
    }


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`run_budgets` over made-up texts: budget -> prompt -> tokens, or None for a kill."""
    (tmp_path / "model").mkdir()

    def start(texts: dict[str, dict[str, list[int]] | None], **options):
        def measure(spec, *, enforce):
            assert spec.modes == ("speculative",)
            found = texts[spec.load["memory_budget"]]
            if found is None:
                raise typer.Exit(KILLED)
            records = [record(prompt, tokens) for prompt, tokens in found.items()]
            return {"records": records, "plan": PLAN}

        monkeypatch.setattr(budgets, "measure_in_child", measure)
        monkeypatch.setattr(budgets, "collect", lambda argv, model: {})
        load = {"model": str(tmp_path / "model")}
        return budgets.run_budgets(load, PROMPTS, {}, list(texts), [], **options)

    return start


def test_texts_are_compared_with_the_first_budgets(run) -> None:
    same, other = {"a": [1, 2, 3], "b": [4]}, {"a": [1, 2, 9], "b": [4]}
    rows = run({"1GiB": same, "2GiB": same, "3GiB": other})["budgets"]
    assert [row["n_equal_texts"] for row in rows] == [2, 2, 1]
    assert rows[2]["first_mismatch"] == {"a": 2}
    assert not any(row["killed"] for row in rows)


def test_a_kill_is_a_result(run) -> None:
    result = run({"1GiB": None, "2GiB": {"a": [1], "b": [2]}}, enforce=True)
    assert [row["killed"] for row in result["budgets"]] == [True, False]
    assert "1GiB      killed by the kernel" in budgets.format_rows(result)
    assert "2 of 2" in budgets.format_rows(result)


def test_text_that_is_not_the_targets_own_is_told(run) -> None:
    rows = run({"1GiB": {"a": [1]}, "2GiB": {"a": [1]}})["budgets"]
    assert [row["is_lossless"] for row in rows] == [True, True]
    rows[1]["is_lossless"] = False
    _, first, second = budgets.format_rows({"budgets": rows}).splitlines()
    assert "LOSSY" not in first
    assert second.endswith("LOSSY (--accept-threshold)")


def test_an_earlier_report_is_the_reference(run, tmp_path: Path) -> None:
    reference = tmp_path / "report.json"
    plain = {**record("b", [7]), "mode": "plain"}
    report = {"plain": {}, "speculative": {}, "records": [record("a", [1]), plain]}
    reference.write_text(json.dumps(report))
    [row] = run({"1GiB": {"a": [1], "b": [2]}}, reference=reference)["budgets"]
    assert (row["n_texts"], row["n_equal_texts"]) == (1, 1)


def test_the_command_keeps_what_it_has_when_it_is_interrupted(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run({"1GiB": {"a": [1]}})  # budgets that are not named there end the command
    measure = budgets.measure_in_child

    def measure_or_end(spec, *, enforce):
        if spec.load["memory_budget"] != "1GiB":
            raise KeyboardInterrupt
        return measure(spec, enforce=enforce)

    monkeypatch.setattr(budgets, "measure_in_child", measure_or_end)
    file = tmp_path / "budgets.json"
    argv = ["budgets", "-m", "pair:target", "--budgets", "1GiB,2GiB", "--output-file", str(file)]
    assert main(argv) == EXIT_INTERRUPTED
    kept = read_results(file)
    assert kept.kind == BUDGETS
    assert [row["memory_budget"] for row in kept.value["budgets"]] == ["1GiB"]
    assert list(kept.value["records"]) == ["1GiB"]


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("--output-file /nonexistent/b.json", "no such folder"),
        ("--reference {other}", "holds results of budgets: give a report of speedup"),
        ("--reference {notes}", "holds no results"),
        ("--budgets lots", "lots"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, part: str
) -> None:
    other, notes = tmp_path / "other.json", tmp_path / "notes.txt"
    other.write_text(json.dumps({"budgets": []}))
    notes.write_text("notes")
    argv = ["budgets", "-m", "pair:target", "--budgets", "1GiB"]
    assert main([*argv, *more.format(other=other, notes=notes).split()]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert part in err


def test_other_failures_are_not_swallowed(run, monkeypatch) -> None:
    def fail(spec, *, enforce):
        raise typer.Exit(2)

    with monkeypatch.context() as patch:
        result = run({"1GiB": {"a": [1]}})
        patch.setattr(budgets, "measure_in_child", fail)
        with pytest.raises(typer.Exit):
            budgets.run_budgets({"model": "."}, PROMPTS, {}, ["1GiB"], [])
    assert len(result["budgets"]) == 1
