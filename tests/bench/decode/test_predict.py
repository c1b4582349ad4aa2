"""Predicted against measured: the settings, one run of a tiny pair, the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model
from typer.testing import CliRunner

from bench.commands.app import app, main
from bench.decode.predict import (
    PredictionError,
    Setting,
    format_rows,
    largest_error,
    make_settings,
    parse_speeds,
)
from bench.decode.prediction_run import PredictionSpec, measure
from bench.process.child import write_spec
from bench.process.results import PREDICTION, read_results
from offload.storage.read_limit import ReadLimit
from specdec.cli.errors import EXIT_INTERRUPTED
from specdec.models.files import largest_weight_file

AFTER = {"storage_bytes_per_second_after": 1e9}


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("pair")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
    load = {
        "model": str(save_model(root / "target", seed=1)),
        "draft_model": str(save_model(root / "draft", seed=1)),
        "memory_budget": "8GiB",
        "ctx_size": 128,
        "num_draft_tokens": 3,
    }
    spec = PredictionSpec(load, "def area(r):", 2)
    path = root / "spec.json"
    write_spec(spec, path)
    assert PredictionSpec.read(path) == spec
    try:
        measured = measure(spec)
    finally:
        patch.undo()
    return {"model": load["model"], "memory_budget": "8GiB", "storage_mbps": 500, **measured}


def test_both_kinds_are_predicted_and_measured(row):
    assert row["plain"]["n_rows"] == 1
    assert row["plain"]["tokens_per_pass"] == 1
    assert row["speculative"]["n_rows"] == 4
    assert row["speculative"]["tokens_per_pass"] > 1  # the draft is the target itself
    for kind in ("plain", "speculative"):
        predicted, measured = row[kind]["predicted"], row[kind]["measured"]
        assert set(predicted) == set(measured)
        for name, error in row[kind]["error"].items():
            assert error == pytest.approx(predicted[name] / measured[name] - 1)
    assert row["plan"]["num_draft_tokens"] == 3
    assert row["storage_bytes_per_second_after"] > 0


def test_the_table_has_a_line_for_each_kind_and_the_largest_error(row):
    lines = format_rows([row, row]).splitlines()
    assert len(lines) == 2 + 4 + 1
    assert "target" in lines[2]
    assert " 500 " in lines[2]
    errors = [abs(e) for kind in ("plain", "speculative") for e in row[kind]["error"].values()]
    assert largest_error([row]) == max(errors)
    assert lines[-1] == f"largest error {max(errors):.1%}"


def test_all_combinations_with_a_draft_in_the_targets_format(tmp_path: Path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    found = list(make_settings([str(gguf), str(folder)], None, ["1GiB", "2GiB"], [None, 500]))
    assert len(found) == 8
    assert found[0] == Setting(gguf, "pair:draft.gguf", "1GiB", None)
    assert found[-1] == Setting(folder, "pair:draft", "2GiB", 500)
    assert next(make_settings([str(gguf)], "mine", ["1GiB"], [None])).draft_model == "mine"


def test_speeds():
    assert parse_speeds("800,unlimited") == [800, None]
    for text in ("", "0", "-1", "fast", "800,", "1e3"):
        with pytest.raises(PredictionError, match="storage-mbps"):
            parse_speeds(text)


def test_the_command_has_its_help():
    result = CliRunner().invoke(app, ["--help"])
    assert "predict" in result.stdout


def test_every_setting_is_held_to_its_budget_and_storage_and_written_at_once(
    row: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The processes are not started: those of slower storage need root."""
    model = Path(row["model"])
    started: list[tuple[str, PredictionSpec, str, ReadLimit | None]] = []
    forgotten: list[Path] = []

    def start(module: str, spec: PredictionSpec, limit: str, reads: ReadLimit | None) -> Any:
        if len(started) == 2:
            raise KeyboardInterrupt
        started.append((module, spec, limit, reads))
        return {name: row[name] for name in ("plain", "speculative", "plan")} | AFTER

    monkeypatch.setattr("bench.decode.predict.result_of_child", start)
    monkeypatch.setattr("bench.decode.predict.forget_model", forgotten.append)
    file = tmp_path / "report.json"
    argv = ["predict", "-m", str(model), "-md", str(model), "--budgets", "1GiB,2GiB", "-c", "256"]
    argv += ["--storage-mbps", "800,unlimited", "--rounds", "3", "--num-draft-tokens", "5"]
    assert main([*argv, "--output-file", str(file)]) == EXIT_INTERRUPTED
    load = {"num_draft_tokens": 5, "ctx_size": 256, "model": str(model), "draft_model": str(model)}
    for module, spec, limit, _ in started:
        assert module == "bench.decode.prediction_run"
        assert spec.load == {**load, "memory_budget": limit}
        assert spec.n_rounds == 3
    assert [limit for _, _, limit, _ in started] == ["1GiB", "1GiB"]
    weights = largest_weight_file(model)
    assert [reads for *_, reads in started] == [ReadLimit(weights, 800_000_000), None]
    assert forgotten == [model] * 6
    kept = read_results(file)
    assert kept.kind == PREDICTION
    assert [one["storage_mbps"] for one in kept.value["settings"]] == [800, None]
    assert kept.value["provenance"]["argv"] == ["specdec-bench", *argv, "--output-file", str(file)]
    assert "3/4 target, 2GiB, storage 800 MB/s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("--storage-mbps turtle", "turtle"),
        ("--output-file /nonexistent/report.json", "no such folder"),
    ],
)
def test_mistakes_are_one_line(
    row: dict[str, Any], capsys: pytest.CaptureFixture[str], more: str, part: str
) -> None:
    argv = ["predict", "-m", row["model"], "--budgets", "1GiB", *more.split()]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert part in err
