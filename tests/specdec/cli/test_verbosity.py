"""Effects of -q and -v on stderr; stdout is the same."""

from __future__ import annotations

import pytest

from specdec.cli.app import main

RUN = ["run", "-m", "pair:target", "-p", "def f(x):", "-n", "3", "--draft-window", "64"]


def run(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    assert main([*RUN, *more]) == 0
    actual = capsys.readouterr()
    return actual.out, actual.err


@pytest.mark.slow
def test_quiet_leaves_notes_and_verbose_shows_the_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, usual = run(capsys)
    assert "tok/s" in usual
    assert "memory budget" not in usual
    assert "pair:target is for demonstrations and tests" in usual
    same, quiet = run(capsys, "-q")
    assert same == text
    assert "tok/s" not in quiet
    assert "demonstrations" not in quiet
    assert "--draft-window has no effect" in quiet
    same, verbose = run(capsys, "-v")
    assert same == text
    assert "tok/s" in verbose
    assert "target KV cache" in verbose
    _, after = run(capsys)  # the next command is unaffected
    assert "tok/s" in after
    assert "target KV cache" not in after


def test_errors_are_reported_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "no/such-model.gguf", "-p", "x", "-q"]) == 2
    assert "no such model" in capsys.readouterr().err
