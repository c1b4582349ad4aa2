"""What is wrong with the options alone is told before any model is looked for, or downloaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.commands.app import main

NO_PROMPTS = "--prompts /nonexistent.jsonl"


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("policy --sizes many", "many"),
        (f"policy {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        (f"speedup {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        (f"curve {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        (f"timeline --trace trace.json {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        (f"peers --memory-budget 1GiB {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        ("peers --memory-budget 1GiB --peer-cpu-memory lots", "'lots' is not a byte count"),
        ("peers --memory-budget 1GiB --other-draft x", "--other-draft goes with --other-model"),
        (f"sweep --trees 0 -o sweep.json {NO_PROMPTS}", "/nonexistent.jsonl: No such file"),
        ("sweep -o sweep.json", "--trees above 0 need a draft model"),
        ("sweep --trees 0 -o sweep.json --reference /nonexistent", "/nonexistent: No such file"),
        ("speedup --output-file pipe", "--output-file pipe: No such device"),
    ],
)
def test_of_a_measurement(
    argv: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    assert main([*argv.split(), "-m", "/nonexistent/model"]) == 2
    error = capsys.readouterr().err
    assert part in error
    assert error.count("\n") == 1
    assert os.listdir() == ["pipe"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ("-o folder", "folder is not empty; choose another folder, or pass --force"),
        ("-o folder --force", "folder is no checkpoint (no config.json): --force spares it"),
        ("-o new --format gguf", "new must end in .gguf"),
        ("-o folder/mine.gguf --format gguf --force", "mine.gguf is no GGUF file"),
    ],
)
def test_of_what_is_grown(
    argv: str,
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.gguf").write_text("mine")
    assert main(["synth", *argv.split(), "--from", "/nonexistent/model"]) == 2
    assert part in capsys.readouterr().err
