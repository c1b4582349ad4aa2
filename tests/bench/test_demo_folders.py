"""The demo: its model name, and the files that it leaves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from bench import demo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def space_in_any_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "smallest_budget", lambda stand_in: -demo._MARGIN_BYTES)


def test_folders_that_the_demo_made_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise typer.Exit(2)

    monkeypatch.setattr(demo, "run_child", fail)
    with pytest.raises(typer.Exit):
        demo.run_demo(size="64MiB", directory=tmp_path / "new" / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_the_users_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise typer.Exit(2)

    monkeypatch.setattr(demo, "run_child", fail)
    with pytest.raises(typer.Exit):
        demo.run_demo(size="64MiB", directory=tmp_path)
    assert tmp_path.is_dir()


def run_module(*argv: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", *argv], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return run.stdout


@pytest.mark.slow
def test_the_demo_is_named_as_it_was_called() -> None:
    assert "Usage: specdec demo" in run_module("specdec", "demo", "--help")
    assert "Usage: specdec-bench demo" in run_module("bench", "demo", "--help")


@pytest.mark.parametrize("command", ["synth"])
def test_commands_in_modules_of_their_own_have_the_same_help_and_debug(command: str) -> None:
    shown = run_module("bench", command, "--help-all")
    assert "--debug" in shown
    assert "<bool>" not in shown


@pytest.mark.parametrize("below", ["", "x"])
def test_a_place_that_is_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(demo.DemoError, match="file is not a folder: name one with --dir"):
        demo.run_demo(size="64MiB", directory=tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"
