"""The command line: names, streams, output of each command."""

from __future__ import annotations

import io
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Models, save_models

import specdec.cli.progress
from specdec.cli.app import main
from specdec.cli.output import say_parts
from specdec.cli.progress import loading_progress, waiting
from specdec.engine.session import Session
from specdec.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


# --- interface ------------------------------------------------------------------------------------


def help_of(capsys: pytest.CaptureFixture[str], command: str) -> str:
    assert main([command, "--help-all"]) == 0
    return capsys.readouterr().out


def test_option_names_are_an_interface(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loading = (
        "-m --model -md --draft-model --memory-budget -c --ctx-size --threads --prefetch-depth "
        "--io-threads --spec-type --num-draft-tokens --tree-width --acceptance --accept-threshold "
        "--draft-ahead --draft-window"
    ).split()
    sampling = (
        "--temperature --top-k --top-p --min-p --repetition-penalty --seed --stop -n --max-tokens "
        "--enforce --prompt-cache-dir --prompt-cache-size"
    ).split()
    own = {"run": ["-p", "--prompt", "-f", "--file", "--json"], "chat": [], "plan": ["--json"]}
    for command, more in own.items():
        words = set(help_of(capsys, command).replace(",", " ").split())
        expected = {*loading, *more, *(() if command == "plan" else sampling)}
        assert expected <= words, expected - words
        assert not words & {"--temp", "--n-predict", "--repeat-penalty"}  # accepted, not shown


def test_no_arguments_show_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in ("run", "chat", "batch", "plan", "check", "profile", "demo"):
        assert command in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("specdec ")


# --- runs -----------------------------------------------------------------------------------------


def test_text_on_stdout_perf_line_on_stderr(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    assert main(models.run_argv("-p", "def f", "-n", "6")) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert len(out) > 1
    assert err.count("\n") == 1
    for part in ("tok/s", "tokens/pass", "GB streamed", "stall", "peak"):
        assert part in err


def run_json(capsys: pytest.CaptureFixture[str], argv: list[str]) -> dict[str, Any]:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("specdec: note: ") for line in err.splitlines()), err
    assert out.count("\n") == 1
    value: dict[str, Any] = json.loads(out)
    return value


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    value = run_json(capsys, models.run_argv("-p", "def f", "-n", "6", "--json"))
    assert set(value) == {"text", "token_ids", "finish_reason", "outputs", "stats"}
    assert len(value["token_ids"]) == value["stats"]["generated_tokens"] <= 6
    promised = (
        "tokens_per_second time_to_first_token time_per_output_token generated_tokens passes "
        "mean_acceptance_length acceptance_rate bytes_streamed stall_seconds draft_seconds "
        "peak_memory_bytes memory_budget_bytes kv_bytes kv_used_fraction kv_shared_bytes "
        "state_bytes flops_rejected_fraction"
    )
    assert set(promised.split()) <= set(value["stats"])


@pytest.mark.slow
def test_every_draft_option_gives_the_same_output(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    sampled = ["-p", "ab", "-n", "8", "--temperature", "0.8", "--seed", "3", "--json"]
    strings = [
        run_json(capsys, models.run_argv(*sampled, "--spec-type", kind))["token_ids"]
        for kind in ("none", "draft", "ngram", "draft,ngram")
    ]
    assert strings.count(strings[0]) == len(strings)


@pytest.mark.slow
def test_prompt_from_stdin_and_file(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct = run_json(capsys, models.run_argv("-p", "x = 1", "-n", "4", "--json"))
    file = tmp_path / "prompt.txt"
    file.write_text("x = 1\n")
    from_file = run_json(capsys, models.run_argv("-f", str(file), "-n", "4", "--json"))
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        from_stdin = run_json(capsys, models.run_argv("-p", "-", "-n", "4", "--json"))
    assert direct["token_ids"] == from_file["token_ids"] == from_stdin["token_ids"]


def test_plan(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    argv = ["plan", "-m", str(models.target), "-md", str(models.draft), "-c", "128"]
    assert main(argv) == 0
    assert "smallest budget that works" in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["smallest_budget_bytes"] > 0


def test_check(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    assert main(["check", "-m", str(models.target), "-md", str(models.draft)]) == 0
    assert "ok" in capsys.readouterr().out
    assert main(["check", "-m", str(models.target), "-md", str(models.other_words)]) == 2
    out, err = capsys.readouterr()
    assert "not compatible" in out
    assert "token 3 is '!' in the target and '(' in the draft" in err
    assert err.count("\n") == 1


def test_profile(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    assert main(["profile", "-m", str(models.target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage_bytes_per_second"] > 0


def test_a_profile_that_is_refreshed_times_the_arithmetic_again(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "specdec").mkdir()
    stale = tmp_path / "specdec" / "times-0123.json"
    stale.write_text("{}")
    assert main(["profile", "-m", str(models.target)]) == 0
    assert stale.exists()
    assert main(["profile", "-m", str(models.target), "--refresh"]) == 0
    assert not stale.exists()


def test_chat_without_a_template_ends_before_the_next_question(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model given a plain transcript may continue with the user's next message."""
    stops: list[object] = []
    chat_params = Session.chat_params

    def noted(self: Session, params: SamplingParams) -> SamplingParams:
        stops.append(chat_params(self, params).stop)
        return chat_params(self, params)

    monkeypatch.setattr(Session, "chat_params", noted)
    (tmp_path / "lines").write_text("\nhello\n")
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["chat", "-m", str(models.target), "-n", "3", "--stop", "x"]) == 0
    assert stops == [("x", "\nUser:")]
    assert capsys.readouterr().err.count("tok/s") == 1


def test_chat_answers_until_the_end_of_input(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(models.target, chatty)
    (chatty / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "lines").write_text("hello\n\nmore\n/exit\nnever\n")
    with (tmp_path / "lines").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["chat", "-m", str(chatty), "-n", "3", "--threads", "1"]) == 0
    err = capsys.readouterr().err
    assert err.count("tok/s") == 2
    assert err.count("note: the answer was cut after --max-tokens 3 tokens") == 2


def test_an_output_cut_by_the_context_is_reported(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    argv = models.run_argv("-p", "hello", "-n", "99", "-c", "16", "--spec-type", "none")
    assert main(argv) == 0
    note = "note: the text was cut where the context of 16 tokens (--ctx-size; the model has 32768)"
    assert note in capsys.readouterr().err
    assert main([*argv, "--json"]) == 0
    assert (
        "context of 16 tokens" in json.loads(capsys.readouterr().out)["outputs"][0]["finish_note"]
    )


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr from here on; not a fixture, since pytest restores its own before the test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with loading_progress("growing") as progress:
        progress(3 * 2**20, 8 * 2**20)
        progress(8 * 2**20, 8 * 2**20)
    shown = terminal.getvalue()
    assert "growing" in shown
    assert "3.0/8.0 MiB" in shown
    assert "growing: finishing" in shown, "a full bar gives way to a line that moves"
    assert shown.endswith("\x1b[2K")  # the line is erased at the end


def test_a_wait_without_bytes_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.cli.progress, "DELAY_SECONDS", 0.0)
    terminal, details = open_terminal(monkeypatch), iter(range(1, 1000))
    with waiting("planning", lambda: f"pair {next(details)}") as indicator:
        end = time.monotonic() + 60
        while "pair 3" not in terminal.getvalue():
            assert time.monotonic() < end, terminal.getvalue()
            time.sleep(0.02)
        indicator.end()
        shown = terminal.getvalue()
        assert shown.endswith("\x1b[2K")
    assert terminal.getvalue() == shown
    assert "planning: pair 1" in shown
    assert "0:00:0" in shown, "the seconds"


def test_a_short_wait_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.cli.progress, "DELAY_SECONDS", 60.0)
    terminal = open_terminal(monkeypatch)
    with waiting("planning"):
        pass
    with loading_progress("loading") as progress:
        progress(8, 8)
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("columns", [40, 80])
def test_metrics_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    parts = [
        "9.64 tok/s",
        "5.31 tokens/pass",
        "12.3 GB streamed",
        "stall 75%",
        "peak 3.4 of 3.5 GiB",
    ]
    say_parts(parts)
    lines = terminal.getvalue().splitlines()
    assert 1 < len(lines) <= 3
    assert max(map(len, lines)) <= columns
    assert [word for line in lines for word in line[9:].split(" | ")] == parts


def test_no_bar_above_an_error_that_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with pytest.raises(ValueError, match="no room"), loading_progress("growing"):
        raise ValueError("no room")
    assert terminal.getvalue() == ""


def test_no_bar_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with loading_progress("loading") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
