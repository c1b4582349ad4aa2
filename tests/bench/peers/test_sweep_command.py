"""`specdec-bench sweep`: options, budgets, output."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fake_peers
import pytest
from result_values import sweep_line
from rich.console import Console
from rich.progress import Progress

from bench.commands.app import main
from bench.commands.sweep import count_setting, parse_speeds, parse_trees
from bench.peers.sweep import Setting, Sweep, auto_budgets
from bench.process.results import read_results
from offload.errors import SpecdecError
from offload.units import GIB


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install_as_specdec(tmp_path, monkeypatch)


@dataclass
class _Placement:
    n_streamed_layers: int
    streamed_bytes: int


@dataclass
class _Plan:
    smallest_budget_bytes: int
    placement: _Placement


@pytest.mark.parametrize(("smallest", "whole"), [(1000, 7300), (500, 501), (10, 100_000)])
def test_auto_budgets_go_from_the_smallest_to_all_in_memory(smallest: int, whole: int) -> None:
    def plan(budget: int | str) -> Any:
        left = 0 if budget == "auto" else max(whole - int(budget), 0)
        return _Plan(smallest, _Placement(left // 100 + (left > 0), left))

    budgets = auto_budgets(plan)
    assert budgets[0] == smallest
    assert whole <= budgets[-1] <= whole * 1.05 + 1
    assert budgets == sorted(budgets)
    assert len(budgets) == 6


def test_the_time_left_is_that_of_what_is_measured() -> None:
    seconds = 0.0
    bar = Progress(
        console=Console(file=io.StringIO()), get_time=lambda: seconds, speed_estimate_period=3600
    )
    task = bar.add_task("sweep", total=10)
    for _ in range(6):
        count_setting(bar, task, is_measured=False)
    for _ in range(2):
        seconds += 60
        count_setting(bar, task, is_measured=True)
    assert (bar.tasks[0].completed, bar.tasks[0].time_remaining) == (8, 120)


def test_names_of_speeds_and_trees() -> None:
    assert parse_speeds("sd-card,full,750,90") == [90.0, None, 750.0]
    assert parse_trees("0,16,auto") == [0, 16, None]


def test_command(capfd: pytest.CaptureFixture[str], target: Path, tmp_path: Path) -> None:
    file = tmp_path / "sweep.jsonl"
    argv = f"sweep -m {target} -md {target} --budgets 1GiB,2GiB --no-enforce -n 10 -o {file}"
    argv += " --n-prompts 1 --threads 1 --trees auto"
    assert main(argv.split()) == 0
    out, err = capfd.readouterr()
    assert "1.00 GiB, full speed, auto tree: " in err
    assert "equal sequences" in out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["setting"]["memory_budget_bytes"] for line in lines] == [2 * GIB, GIB]
    assert lines[0]["provenance"]["argv"][1] == "sweep"
    assert main(argv.split()) == 0
    assert capfd.readouterr().err.count("already there") == 2


def test_automatic_budgets_are_those_that_the_file_was_begun_with(
    capfd: pytest.CaptureFixture[str],
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured memory and time vary a little from start to start."""
    jitter = iter((0, 4096, 12345))

    def plan_run(model: str, *, memory_budget: int | str, **more: Any) -> Any:
        if memory_budget == "auto":
            plan_run.smallest = GIB + next(jitter)  # type: ignore[attr-defined]
        smallest: int = plan_run.smallest  # type: ignore[attr-defined]
        left = max(0, smallest * 3 - int(0 if memory_budget == "auto" else memory_budget))
        return _Plan(smallest, _Placement(left // 100, left))

    def measure(sweep: Sweep, setting: Setting) -> dict[str, Any]:
        return {**sweep_line(1, None, 0, 1.0), "setting": asdict(setting)}

    monkeypatch.setattr("specdec.planning.plan.plan_run", plan_run)
    monkeypatch.setattr("bench.peers.sweep.measure_setting", measure)
    file = tmp_path / "sweep.jsonl"
    argv = f"sweep -m {target} -md {target} --no-enforce -n 5 --n-prompts 1 --threads 1 --trees 0"
    assert main([*argv.split(), "-o", str(file)]) == 0
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    file.write_text("".join(lines[:4]) + '{"setting": {"mem')  # ended in the fifth
    capfd.readouterr()
    assert main([*argv.split(), "-o", str(file)]) == 0
    assert capfd.readouterr().err.count("already there") == 4
    settings = [line["setting"] for line in read_results(file).value["settings"]]
    assert settings == [json.loads(line)["setting"] for line in lines]
    # For other models, or another context, they are planned anew.
    assert main([*argv.split(), "-o", str(file), "-c", "1024"]) == 0
    assert "already there" not in capfd.readouterr().err
    assert len(read_results(file).value["settings"]) == 12


@pytest.mark.parametrize(
    "text", ['{"a":1}\n', "x\n", '{"plain": 1, "speculative": 1, "records": []}']
)
def test_a_file_of_something_else_is_refused_before_any_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    argv = f"sweep -m /nonexistent --trees 0 --budgets 1GiB -o {path}"
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"specdec-bench: error: {path} ")
    assert error.endswith("name another file\n")
    assert path.read_text() == text


def test_trees_above_what_can_be_drafted_are_refused_at_once() -> None:
    with pytest.raises(SpecdecError, match="'99999', must be auto or a whole number from 0 to"):
        parse_trees("0,99999")
