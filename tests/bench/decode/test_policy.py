"""The automatic policy against fixed trees: results from records, and a run on tiny models."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from interrupting import InterruptedAt
from tiny_pair import save_model

from bench.commands.app import main
from bench.decode.measure import MeasureSpec, measure
from bench.decode.modes import TreeSize, parse_sizes
from bench.decode.policy import summarise
from bench.options import UsageMistake
from bench.prompts.workloads import Prompt
from bench.report.tables import tables
from bench.table import text_of
from specdec.config import SpecConfig
from specdec.metrics.recorder import StatsRecorder

pytestmark = pytest.mark.usefixtures("forked_children")


def record(mode: str, seconds: float) -> dict[str, object]:
    stats = StatsRecorder(prompt_tokens=1).stats().to_dict()
    made = {"generated_tokens": 11, "passes": 5, "drafted_tokens": 20, "accepted_tokens": 5}
    return {"mode": mode, "stats": {**stats, **made, "decode_seconds": seconds}}


def test_sizes_are_draft_tokens_by_levels() -> None:
    assert parse_sizes("8x4, 16x8") == (TreeSize(8, 4), TreeSize(16, 8))
    assert TreeSize(8, 4).name == "8x4"
    assert parse_sizes("8x4:on") == (TreeSize(8, 4, "on"),)
    assert TreeSize(8, 4, "on").name == "8x4:on"


def test_a_size_fixes_the_tree_and_drafting_ahead_where_it_says_so() -> None:
    spec = SpecConfig(draft_ahead="off")
    assert TreeSize(8, 4).apply(spec).draft_ahead == "off"
    applied = TreeSize(8, 4, "on").apply(spec)
    assert (applied.num_draft_tokens, applied.depth, applied.draft_ahead) == (8, 4, "on")


@pytest.mark.parametrize(
    "text", ["", "8", "8x", "x4", "0x4", "8x4,", "axb", "8x-1", "8x4:", "8x4:auto"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageMistake, match="give draft tokens x depth"):
        parse_sizes(text)


def test_auto_is_compared_with_the_best_of_the_others() -> None:
    seconds = {"plain": 10.0, "2x2": 4.0, "8x4": 5.0, "auto": 4.4}
    result = summarise([record(mode, s) for mode, s in seconds.items() for _ in range(2)])
    assert result["best_fixed"] == "2x2"
    assert result["auto_versus_best_fixed"] == pytest.approx(4.0 / 4.4)
    assert result["auto_versus_plain"] == pytest.approx(10.0 / 4.4)
    assert {row["mean_tree_nodes"] for row in result["rows"]} == {4.0}
    assert "0.909 x the best fixed size (2x2), 2.273 x plain" in text_of(tables("policy", result))


def test_the_process_is_limited_to_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[str | None] = []

    def child(module: str, argv: list[str], limit: str | None) -> int:
        limits.append(limit)
        records = [record("2x2", 1.0), record("auto", 1.0)]
        Path(argv[1]).write_text(json.dumps({"records": records, "plan": {}}))
        return 0

    monkeypatch.setattr("bench.process.child.run_child", child)
    argv = ["policy", "-m", str(save_model(tmp_path / "target", 1)), "--sizes", "2x2"]
    assert main([*argv, "--memory-budget", "1GiB", "--enforce"]) == 0
    assert main([*argv, "--memory-budget", "1GiB"]) == 0
    assert limits == ["1GiB", None]
    assert "1.000 x the best fixed size (2x2)" in capsys.readouterr().out
    assert main([*argv, "--enforce"]) == 2
    assert "--enforce needs a --memory-budget with a size" in capsys.readouterr().err


def test_output_that_is_not_the_targets_own_is_reported() -> None:
    lossy = record("auto", 1.0)
    lossy["stats"]["is_lossless"] = False  # type: ignore[index]
    [table] = tables("policy", summarise([record("2x2", 1.0), lossy]))
    assert [row[0] for row in table.rows] == ["2x2", "auto  LOSSY (--accept-threshold)"]


@pytest.mark.slow
def test_a_sweep_decodes_the_same_sequence_in_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stderr", io.StringIO())
    target, draft = save_model(tmp_path / "target", 1), save_model(tmp_path / "draft", 1)
    report = tmp_path / "report.json"
    argv = ["policy", "-m", str(target), "-md", str(draft), "--sizes", "2x2,6x3", "-n", "8"]
    log = tmp_path / "log.jsonl"
    argv += ["--n-prompts", "1", "-c", "512", "--output-file", str(report), "--log", str(log)]
    assert main(argv) == 0
    result = json.loads(report.read_text())
    assert [row["mode"] for row in result["rows"]] == ["plain", "2x2", "6x3", "auto"]
    assert all(row["is_lossless"] for row in result["rows"])
    assert (result["enforced"], result["model"]) == (False, str(target))
    assert result["provenance"]["argv"][:2] == ["specdec-bench", "policy"]
    assert len({tuple(record["token_ids"]) for record in result["records"]}) == 1
    assert [json.loads(line) for line in log.read_text().splitlines()] == result["records"]
    assert "x plain decoding" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load = {"model": str(save_model(tmp_path / "target", 1)), "ctx_size": 128}
    prompts, log = [Prompt("a", "x = "), Prompt("b", "y")], tmp_path / "log.jsonl"
    modes = ("plain", "2x2")
    spec = MeasureSpec(load, prompts, {"max_tokens": 4}, str(log), modes=modes, probes=False)
    with pytest.raises(KeyboardInterrupt):
        measure(spec, InterruptedAt(1))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["mode"] for record in records] == ["plain", "2x2"]
    assert records[0]["token_ids"] == records[1]["token_ids"]
