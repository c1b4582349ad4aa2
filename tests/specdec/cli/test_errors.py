"""Invalid input on the command line: always one clear line and exit code 2."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from command_line import Models, expect_error, save_models

from specdec.cli.app import main
from specdec.cli.input.prompts import read_bounded, read_prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


def test_prompt_that_is_not_utf8(
    capsys: pytest.CaptureFixture[str], models: Models, tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff")
    expect_error(capsys, models.run_argv("-f", str(tmp_path / "binary")), "byte 2 is not UTF-8")


def test_a_prompt_without_an_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["run", "-m", "pair:target", "-f"]
    expect_error(capsys, [*argv, "/dev/zero"], "/dev/zero is a device: give a file")
    expect_error(capsys, [*argv, "/dev/null"], "the prompt is empty")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**36)
    expect_error(capsys, [*argv, str(tmp_path / "huge")], "huge has more than 64.00 MiB")


def test_stdin_without_an_end_and_pipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/zero") as zero:
        monkeypatch.setattr("sys.stdin", zero)
        expect_error(capsys, ["run", "-m", "pair:target", "-p", "-"], "stdin is a device")
    reading, writing = os.pipe()
    os.write(writing, b"some text\n")
    os.close(writing)
    assert read_prompt(None, Path(f"/dev/fd/{reading}")) == "some text"
    os.close(reading)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    argv = ["run", "-m", "pair:target", "-f", str(tmp_path / "pipe")]
    expect_error(capsys, argv, "pipe is a pipe that nobody writes to", "give some text with -p")


def test_a_pipe_is_read_to_its_writers_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)  # so that opening it is quick
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    text = "a" * 100_000
    thread = threading.Thread(target=_write_and_close, args=(writer, text.encode()))
    thread.start()
    assert read_prompt(None, tmp_path / "pipe") == text
    thread.join()
    os.close(reader)


def test_a_prompt_of_the_command_line_that_is_not_utf8(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["run", "-m", "/nonexistent", "-p", os.fsdecode(b"def \xff")]
    expect_error(capsys, argv, "-p: character 4 of the prompt is not UTF-8: type it", "with -f")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "/nonexistent/model", "-p", "a", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_prompt_from_a_pipe_that_does_not_block_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    text = b"a" * 100_000  # more than the pipe holds: a non-blocking read gets a part
    thread = threading.Thread(target=_write_and_close, args=(writer, text))
    with os.fdopen(reader, "rb") as stream:
        thread.start()
        assert read_bounded(stream, "stdin") == text
    thread.join()


def _write_and_close(descriptor: int, text: bytes) -> None:
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(text)


def test_serve_shows_errors_with_the_variable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.cli.commands import serve
    from specdec.serve.run import HowEnded

    calls: list[bool] = []

    class Serving:
        def __init__(self, *_: object, is_debug: bool, **options: object) -> None:
            calls.append(is_debug)

        def run(self) -> HowEnded:
            return HowEnded()

    monkeypatch.setattr(serve, "_import_server", lambda: Serving)
    for value in ("1", "0"):
        monkeypatch.setenv("SPECDEC_DEBUG", value)
        assert main(["serve", "-m", "pair:target"]) == 0
    assert calls == [True, False]


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["list"], "No such command 'list': use specdec models"),
        (["show", "smollm2"], "use specdec models, or specdec plan -m MODEL"),
        (["run", "smollm2", "hi", "there"], "quote a prompt of several words, and name the model"),
        (["run", "smollm2", "hi", "-p", "ho"], "(hi): -p gives the prompt already: leave one of"),
        (["run", "-m", "smollm2", "--prompt=a", "b"], "--prompt gives the prompt already"),
        (["run", "smollm2", "-f", "a.txt", "hi"], "-f gives the prompt already"),
        (["chat", "smollm2", "hi"], "(hi): a chat takes its messages at its own prompt or from"),
        (["chat", "smollm2", "-p", "hi"], "No such option: -p: a chat takes its messages"),
        (["recommend", "smollm2"], "it takes options alone; specdec plan -m MODEL is about one"),
        (["ps", "extra"], "(extra): it takes options alone (see specdec ps --help)"),
        (["plan", "smollm2", "more"], "(more): name the model once (see specdec plan --help)"),
        (["pull", "a/b", "c/d"], "unexpected extra argument(s) (c/d) (see specdec pull --help)"),
        (["run", "smollm2", "hi", "-c", "abc"], "'abc' should be a valid integer (see"),
    ],
)
def test_a_misplaced_word_comes_with_a_remedy(
    argv: list[str], remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert remedy in capsys.readouterr().err
