"""User errors reported before heavy imports, and notes on options without effect."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, Models, save_models, start
from gguf_models import save_tiny_gguf

from specdec.cli.app import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    ("more", "note"),
    [
        (["--spec-type", "ngram"], "is not used: --spec-type is ngram"),
        (["--num-draft-tokens", "0"], "is not used: --num-draft-tokens is 0"),
        (["-c", "99999"], "a context of 99999 is cut to the model's 32768"),
        (["--load-mode", "ram", "--prefetch-depth", "3"], "--prefetch-depth has no effect: no l"),
        (["--acceptance", "block", "--draft-ahead", "on"], "--draft-ahead has no effect: chains"),
    ],
)
def test_options_without_effect_are_noted(
    capsys: pytest.CaptureFixture[str], models: Models, more: list[str], note: str
) -> None:
    assert main(models.run_argv("-p", "ab", "-n", "2", *more)) == 0
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("specdec: note: ")
    assert note in first
    assert len(rest) == 1  # the perf line


@pytest.mark.parametrize("none", [["--spec-type", "none"], ["--num-draft-tokens", "0"]])
def test_options_of_drafting_are_noted_where_nothing_drafts(
    capsys: pytest.CaptureFixture[str], models: Models, none: list[str]
) -> None:
    argv = ["run", "-m", str(models.target), "-p", "ab", "-n", "2", *none]
    more = ["--tree-width", "3", "--accept-threshold", "0.3", "--draft-ahead", "on"]
    assert main([*argv, *more]) == 0
    *notes, last = capsys.readouterr().err.splitlines()
    assert notes == [
        f"specdec: note: {name} has no effect: nothing is drafted"
        for name in ("--tree-width", "--accept-threshold", "--draft-ahead")
    ]
    assert "LOSSY" not in last


def test_only_a_draft_model_drafts_ahead(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    argv = ["run", "-m", str(models.target), "-p", "ab", "-n", "2", "--draft-ahead", "on"]
    assert main(argv) == 0
    assert "note: --draft-ahead has no effect: only a draft model" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.gguf
def test_notes_on_files_that_are_mapped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    path = save_tiny_gguf("llama", tmp_path / "model.gguf")
    argv = ["plan", "-m", str(path), "--load-mode", "mmap", "--memory-budget", "1GiB"]
    assert main([*argv, "--io-threads", "2"]) == 0
    assert capsys.readouterr().err == (
        "specdec: note: --io-threads has no effect: nothing of the target streams\n"
    )
    os.truncate(path, 2**31)  # bytes after the tensors belong to none, but are mapped all the same
    assert main(argv) == 0
    err = capsys.readouterr().err
    assert err.startswith("specdec: note: --load-mode mmap maps 2.00 GiB of weights, more than")
    assert "specdec neither counts nor limits" in err
    assert err.count("\n") == 1


def test_chat_without_a_template_says_so_before_the_user_types(
    capsys: pytest.CaptureFixture[str], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(
        "specdec.cli.chat.editor.LineReader.read", lambda _: heard.append(capsys.readouterr().err)
    )
    assert main(["chat", "-m", str(models.target)]) == 0
    assert "note: the model has no chat template: it is given a plain transcript" in heard[0]
    assert main(["chat", "-m", str(models.target), "--chat-template", "chatml"]) == 0
    assert heard[1] == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_stdout_is_named() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "specdec", "models", "--json"],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.returncode == 2
    assert run.stderr.startswith("specdec: error: cannot write to stdout: No space left")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("specdec run -m ./none -p x", "specdec"),
        ("specdec --version", "specdec"),
        ("bench demo --keep", "specdec-bench"),
    ],
)
def test_a_closed_stdout_is_reported_first(command: str, name: str) -> None:
    run = run_in_shell(f"-m {command} >&-")
    assert run.returncode == 2
    assert run.stderr == f"{name}: error: stdout is closed: send it to a file, or to /dev/null\n"


@pytest.mark.slow
def test_closed_streams_do_no_harm(models: Models, tmp_path: Path) -> None:
    argv = f"-m specdec run -m {models.target} -n 2"
    run = run_in_shell(f"{argv} -p ab 2>&-")
    assert run.returncode == 0
    assert run.stdout
    run = run_in_shell(f"{argv} -p - <&-")
    assert (run.returncode, run.stdout) == (2, "")
    message = "stdin has no text: the prompt is empty: give some text with -p or -f"
    assert run.stderr == f"specdec: error: {message}\n"
    assert run_in_shell(f"{argv} -p a --bogus <&- >&- 2>&-").returncode == 2


def run_in_shell(words: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} {words}"
    return subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)


def test_the_libraries_hints_are_not_shown(models: Models, tmp_path: Path) -> None:
    """transformers warns on stderr about prompts above the tokenizer's own limit."""
    model = shutil.copytree(models.target, tmp_path / "model")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "model_max_length": 4}))
    argv = ["run", "-m", str(model), "-p", "abcdefgh", "-n", "2", "--json"]
    process = start(argv)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")


@pytest.mark.parametrize("command", ["run", "chat", "plan", "check", "profile"])
def test_help_shows_flags_without_a_type(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert "<bool>" not in capsys.readouterr().out


def test_our_own_warnings_are_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    logging.getLogger("offload.ring.bandwidth").warning("not %s", "kept")
    assert capsys.readouterr().err == "specdec: note: not kept\n"
