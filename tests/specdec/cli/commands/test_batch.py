"""`specdec batch` on the command line: output and exit."""

from __future__ import annotations

import io
import json
import shutil
import signal
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from command_line import Models, expect_error, save_models, start
from crashed_batches import LOG_BYTES, partial_bytes
from tiny_pair import save_model

from specdec.batch.journal import Journal
from specdec.batch.lines import LineKey
from specdec.cli.app import main


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


def test_failures_of_an_earlier_run_count(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(models, source, "-n", "2")) == 0
    source.write_text(source.read_text() + '\n{"prompt": "fg"}\n')
    capsys.readouterr()
    assert main(argv(models, source, "-n", "2")) == 0
    err = capsys.readouterr().err
    assert "note: 1 of the lines could not be answered" in err
    assert "5 lines (4 of them before), 1 failed" in err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    body = {"model": "gpt-4o", "prompt": "x"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    path.write_text('{"prompt": "abc"}\n{"prompt": "de", "max_tokens": 2}\n{\n' + json.dumps(line))
    return path


def argv(models: Models, source: Path, *more: str) -> list[str]:
    out = str(source.with_name("out.jsonl"))
    return ["batch", str(source), "-m", str(models.target), "--threads", "1", "-o", out, *more]


def test_a_batch(models: Models, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv(models, source, "-md", str(models.draft), "-n", "5")) == 0
    out, err = capsys.readouterr()
    assert out == ""
    notes = err.splitlines()
    assert notes[0].startswith("specdec: note: some lines ask for the model gpt-4o; ")
    assert notes[1].startswith(
        "specdec: note: 1 of the lines could not be answered: see `error` in "
    )
    assert notes[2].startswith("specdec: 4 lines, 1 failed | 12 tokens | ")
    assert " tokens per pass of " in notes[2]
    assert len(notes) == 3
    records = [json.loads(line) for line in source.with_name("out.jsonl").read_text().splitlines()]
    assert [record.get("usage", {}).get("completion_tokens") for record in records] == [
        5,
        2,
        None,
        None,
    ]
    assert records[3]["response"]["body"]["usage"]["completion_tokens"] == 5


def test_a_batch_without_any_answer_fails(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records are there, and the same command says the same again."""
    source.write_text('{\n{"prompt": 5}\n')
    for _ in range(2):
        assert main(argv(models, source, "--json")) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["n_errors"] == 2
        assert err.endswith(
            f"specdec: error: no line of {source} could be answered: see `error` in "
            f"{source.with_name('out.jsonl')}\n"
        )
        assert err.count("could") == 1
        lines = source.with_name("out.jsonl").read_text().splitlines()
        assert len([json.loads(line)["error"] for line in lines]) == 2


def test_a_note_is_said_once(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unused = ("-md", str(models.draft), "--spec-type", "none", "-n", "2")
    assert main(argv(models, source, *unused)) == 0
    assert capsys.readouterr().err.count("is not used") == 1


def test_again_there_is_nothing_to_do(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(models, source, "-n", "2", "--quiet")) == 0
    assert "could not be answered" in capsys.readouterr().err
    assert main(argv(models, source, "-n", "2", "--json")) == 0
    out, err = capsys.readouterr()
    assert "note: 1 of the lines could not be answered" in err
    summary = json.loads(out)
    assert summary["n_lines"] == summary["n_answered"] == summary["n_before"] == 4
    assert summary["n_errors"] == 1
    assert summary["n_generated_tokens"] == 0


def test_other_weights_under_the_same_name_are_noticed(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, copy = source.with_name("model"), source.with_name("copy")
    save_model(model, seed=1)
    shutil.copytree(model, copy)
    out = source.with_name("out.jsonl")
    here = ["batch", str(source), "-m", str(model), "--threads", "1", "-n", "2", "-o", str(out)]
    assert main([*here, "-q"]) == 0
    shutil.rmtree(model)
    shutil.move(copy, model)
    capsys.readouterr()
    assert main([*here, "--json"]) == 0, "a copy is the same model"
    assert json.loads(capsys.readouterr().out)["n_before"] == 4
    shutil.rmtree(model)
    save_model(model, seed=2)
    capsys.readouterr()
    expect_error(capsys, here, "other options or weights", f"remove {out}")
    answered = out.read_bytes()
    out.unlink()
    with Journal(out, {"weights": "0123"}) as journal:
        journal.append(LineKey(1, 1), answered.splitlines(keepends=True)[0])
    expect_error(capsys, here, "begun with", "weights")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal(
    models: Models, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quiet in (True, False):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "120")
        argv_of_one = argv(models, source, "-n", "2", *(("-q",) if quiet else ()))
        assert main(argv_of_one) == 0
        source.with_name("out.jsonl").unlink()
        shown = terminal.getvalue()
        assert ("4/4" in shown) == ("0:00:00 left" in shown) == (not quiet)
        assert ("4 lines, 1 failed" in shown) == (not quiet)
        assert "could not be answered" in shown


def test_other_options_are_refused_by_name(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv(models, source, "-n", "2", "--temperature", "1")) == 0
    capsys.readouterr()
    changed = argv(models, source, "-n", "2", "--temperature", "0.5")
    expect_error(capsys, changed, "with other options", "remove")
    # Options that do not affect the output may change.
    assert main(argv(models, source, "-n", "2", "--temperature", "1", "--spec-type", "none")) == 0


def test_user_errors_are_reported_before_a_model_is_loaded(
    models: Models, source: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expect_error(capsys, argv(models, source, "--order", "x"), "--order is 'x'", "input, finished")
    expect_error(capsys, argv(models, tmp_path), "Is a directory")
    expect_error(capsys, argv(models, tmp_path / "none.jsonl"), "none.jsonl: No such file")
    expect_error(capsys, argv(models, source)[:-2], "output-file")
    no_model = models._replace(target=tmp_path / "none")
    expect_error(capsys, argv(no_model, source), "none")
    # The check also precedes the search for weights, which may be a download.
    expect_error(capsys, argv(no_model, tmp_path / "typo.jsonl"), "typo.jsonl: No such file")
    (tmp_path / "empty.jsonl").write_text("\n")
    expect_error(capsys, argv(no_model, tmp_path / "empty.jsonl"), "empty.jsonl has no line to")
    elsewhere = str(tmp_path / "gone" / "out.jsonl")
    expect_error(capsys, argv(models, source, "-o", elsewhere), "gone for out.jsonl: make it")
    assert list(tmp_path.glob("out*")) == []
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    expect_error(capsys, argv(models, source), "specdec batch did not write it")
    assert out.read_text() == "mine"


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_answered(models: Models, tmp_path: Path) -> None:
    source, partial = tmp_path / "in.jsonl", tmp_path / "out.jsonl.partial"
    source.write_text('{"prompt": "a", "max_tokens": 5}\n' * 3000)
    process = start(argv(models, source))
    while partial_bytes(source.with_name("out.jsonl")) < 7 * LOG_BYTES:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    messages = err.decode().splitlines()
    assert messages[-1] == "specdec: interrupted"
    n_answered = int(messages[0].removeprefix("specdec: note: ").split()[0])
    assert messages[0].endswith(
        "of 3000 lines are answered; the same command goes on with the others"
    )
    with closing(sqlite3.connect(partial)) as database:
        assert database.execute("SELECT count(*) FROM records").fetchone() == (n_answered,)


def test_plan_tells_what_several_machines_do(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["plan", "-m", str(models.target), "-c", "128", "--machines", "3"]
    assert main(argv) == 0
    assert "3 machines like this one, 3 times its lines: " in capsys.readouterr().out
    assert main([*argv, "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    item = actual["predicted_tokens_per_second"]
    assert actual["machines"]["tokens_per_second"] == pytest.approx(3 * item)
