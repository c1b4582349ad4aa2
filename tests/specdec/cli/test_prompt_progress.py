"""Progress of a long prompt on the command line's terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from tiny_pair import save_model

from specdec.cli.app import main
from specdec.cli.output import prompt_progress
from specdec.engine.outputs import PromptProgress
from specdec.policy.cost_model import CostModel

NUM_TOKENS = 1600


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def shown(self) -> str:
        """Text without colours."""
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr from here on; not a fixture, since pytest restores its own before the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


@pytest.mark.parametrize(
    ("num_cached", "num_processed", "left"),
    [(0, 0, None), (0, 8000, 30.0), (7000, 8000, 240.0), (0, 32000, 0.0)],
)
def test_time_left(num_cached: int, num_processed: int, left: float | None) -> None:
    assert PromptProgress(32000, num_cached, num_processed, 10.0).seconds_left == left


def test_tokens_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with prompt_progress() as note:
        note(None)
        note(PromptProgress(100, 0, 0, 0.0))
        assert terminal.getvalue() == "", "a short prompt has no bar"
        note(PromptProgress(32000, 0, 0, 0.0))
        note(PromptProgress(32000, 0, 8000, 100.0))
    shown = terminal.getvalue()
    assert "reading the prompt" in terminal.shown
    assert "8000/32000 tokens 0:05:00 left" in terminal.shown
    assert shown.endswith("\x1b[2K")  # the line is erased at the end
    note(PromptProgress(32000, 0, 32000, 400.0))
    assert terminal.getvalue() == shown, "a late call of the engine's thread"


def run(model: Path, num_tokens: int, *more: str) -> int:
    """Complete a prompt of as many tokens, in passes of 400."""
    argv = ["run", "-m", str(model), "--raw", "-c", "2048", "-n", "2", "--spec-type", "none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CostModel, "max_num_tokens", lambda self, seconds: 400)
        return main([*argv, "-p", "x" * num_tokens, *more])


def test_a_run_shows_it_before_its_text(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    assert run(model, NUM_TOKENS) == 0
    assert f" 0/{NUM_TOKENS} tokens" in terminal.shown
    assert f" {NUM_TOKENS}/{NUM_TOKENS} tokens" in terminal.shown


@pytest.mark.parametrize("more", [(), ("-q",)])
def test_a_log_has_none(model: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    assert run(model, NUM_TOKENS, *more) == 0
    assert "reading the prompt" not in capsys.readouterr().err
