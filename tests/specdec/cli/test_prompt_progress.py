"""Progress of a long prompt on the command line's terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_pair import save_model

from specdec.cli.app import main
from specdec.cli.streaming import prompt_progress
from specdec.engine.scheduler import Scheduler
from specdec.engine.sequences.outputs import PromptProgress

NUM_TOKENS = 1600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.mark.parametrize(
    ("num_cached", "num_processed", "left"),
    [(0, 0, None), (0, 8000, 30.0), (7000, 8000, 240.0), (0, 32000, 0.0)],
)
def test_time_left(num_cached: int, num_processed: int, left: float | None) -> None:
    assert PromptProgress(32000, num_cached, num_processed, 10.0).seconds_left == left


@pytest.mark.parametrize(
    ("progress", "shown"),
    [
        (None, ""),
        (PromptProgress(32000, 0, 0, 0.0), ""),
        (PromptProgress(32000, 500, 500, 0.0), "500 of 32000 tokens"),
        (PromptProgress(32000, 0, 8000, 100.0), "8000 of 32000 tokens, 0:05:00 left"),
    ],
)
def test_tokens_and_time_left(progress: PromptProgress | None, shown: str) -> None:
    assert prompt_progress(progress) == shown


def run(model: Path, num_tokens: int, *more: str) -> int:
    """Complete a prompt of as many tokens, in passes of 400."""
    argv = ["run", "-m", str(model), "--raw", "-c", "2048", "-n", "2", "--spec-type", "none"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_max_prompt_tokens", lambda self: 400)
        return main([*argv, "-p", "x" * num_tokens, *more])


@pytest.mark.parametrize("more", [(), ("-q",)])
def test_a_log_has_none(model: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    assert run(model, NUM_TOKENS, *more) == 0
    assert "reading the prompt" not in capsys.readouterr().err
