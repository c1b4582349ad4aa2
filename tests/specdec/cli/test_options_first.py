"""What is wrong with the options alone is told before any model is opened: that may take long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from command_line import expect_error


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of which opening tells another mistake."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ("--prompt-cache-file /nonexistent/cache", "lies in a folder that is not there"),
        ("--prompt-cache-file /tmp", "the prompt cache file /tmp is a folder"),
        ("--prompt-cache-file /etc/passwd", "/etc/passwd cannot be used"),
        ("--prompt-cache-file /dev/full", "/dev/full is not a regular file"),
        ("--memory-budget 900TiB", "the memory budget of 989560464998400B"),
        ("--vram-budget 1GiB", "--vram-budget is 1GiB, but the target is computed on the CPU"),
        ("--draft-device cuda", "--draft-device is 'cuda', but the target is computed on the CPU"),
    ],
)
def test_of_a_run(model: Path, capsys: pytest.CaptureFixture[str], options: str, part: str) -> None:
    expect_error(capsys, ["run", "-m", str(model), "-p", "x", *options.split()], part)


def test_a_prompt_cache_file_that_nobody_writes_to_is_not_waited_for(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    argv = ["run", "-m", str(model), "-p", "x", "--prompt-cache-file", str(tmp_path / "pipe")]
    expect_error(capsys, argv, "pipe is not a regular file")


def test_of_a_plan(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", "-m", str(model), "--memory-budget", "900TiB"]
    expect_error(capsys, argv, "is above the limit of this process")
