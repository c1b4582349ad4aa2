"""Bad input on the command line: one clear line and exit code 2, whatever is wrong."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Models, expect_error, save_models

from specdec.cli.app import main
from specdec.cli.input.prompts import read_bounded, read_prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ([], "no prompt was given"),
        (["-p", "a", "-f", "b"], "both -p and -f"),
        (["-f", "/nonexistent/prompt"], "/nonexistent/prompt: No such file"),
        (["-f", "/"], "Is a directory"),
        (["-p"], "'-p' requires an argument (see"),
        (["-p", "a", "--bogus"], "--bogus"),
        (["-p", "a", "extra"], "extra"),
        (["-p", "a", "-n", "0"], "'0' should be greater than or equal to 1 (see specdec run"),
        (["-p", "a", "-n", "x"], "-n' / '--max-tokens': 'x' should be a valid integer"),
        (["-p", "a", "-c", "-1"], "-c"),
        (["-p", "a", "--memory-budget", "lots"], "--memory-budget: 'lots' is not a byte count"),
        (["-p", "a", "--memory-budget", "0GB"], "--memory-budget is 0GB, must be positive"),
        (["-p", "a", "--vram-budget", "5"], "--vram-budget: '5' has no unit"),
        (["-p", "a", "--memory-budget", "20MiB"], "smallest budget"),
        (["-p", "a", "--memory-budget", "1000TiB"], "memory budget"),
        (["-p", "a", "--enforce"], "--enforce needs a size"),
        (["-p", "a", "--enforce", "--memory-budget", "1MiB"], "too little"),
        (["-p", "a", "--spec-type", "magic"], "magic"),
        (["-p", "a", "--num-draft-tokens", "many"], "'many'"),
        (["-p", "a", "--num-draft-tokens", "-1"], "'-1', must be auto or a whole number from 0"),
        (["-p", "a", "--num-draft-tokens", "99999"], "99999"),
        (["-p", "a", "--draft-ahead", "maybe"], "--draft-ahead is 'maybe'"),
        (["-p", "a", "--temperature", "-1"], "--temperature is -1.0"),
        (["-p", "a", "--temperature", "nan"], "--temperature is nan"),
        (["-p", "a", "--top-p", "1.5"], "--top-p is 1.5"),
        (["-p", "a", "--seed", "-1"], "--seed is -1"),
        (["-p", "a", "--stop", ""], "--stop holds ''"),
        (
            ["-p", "a", "--num-return-sequences", "2"],
            "--num-return-sequences is 2, but greedy decoding has one result: set a temperature "
            "or --num-beams",
        ),
        (["-p", ""], "prompt is empty"),
        (["-p", "a" * 200, "-c", "100"], "200 tokens"),
    ],
)
def test_bad_options(
    capsys: pytest.CaptureFixture[str], models: Models, more: list[str], part: str
) -> None:
    expect_error(capsys, models.run_argv(*more), part)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["bogus"], "bogus"),
        (["run", "-p", "a"], "--model"),
        (["check", "-m", "x"], "--draft-model"),
        (["run", "-m", "/nonexistent/model", "-p", "a"], "/nonexistent/model"),
        (["run", "-m", "nobody/nothing", "-p", "a"], "nobody/nothing"),
        (["run", "-m", "pair:other", "-p", "a"], "pair:other"),
        (["plan", "-m", "/"], "config.json"),
        (["profile", "-m", "/nonexistent/model"], "/nonexistent/model"),
    ],
)
def test_bad_commands_and_models(
    capsys: pytest.CaptureFixture[str], argv: list[str], part: str
) -> None:
    expect_error(capsys, argv, part)


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


@pytest.mark.parametrize("option", [["-ctk", "q8_0"], ["--load-mode", "mmap"]])
@pytest.mark.parametrize("command", [["run", "-p", "a"], ["plan"]])
def test_the_embedded_model_is_called_as_it_was_named(
    capsys: pytest.CaptureFixture[str], command: list[str], option: list[str]
) -> None:
    assert main([*command, "-m", "pair:target", *option]) == 2
    error = capsys.readouterr().err
    assert "for GGUF models" in error
    assert "/pair/" not in error


def test_a_draft_with_another_vocabulary(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    argv = ["run", "-m", str(models.target), "-md", str(models.other_words), "-p", "a"]
    expect_error(capsys, argv, "token 3 is '!' in the target and '(' in the draft")


def _first_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.safetensors"))[0]


def _truncate(directory: Path) -> None:
    shard = _first_shard(directory)
    os.truncate(shard, shard.stat().st_size - 100)


def _garble_header(directory: Path) -> None:
    with _first_shard(directory).open("r+b") as file:
        file.write(b"\xff" * 8)


def _remove_shard(directory: Path) -> None:
    _first_shard(directory).unlink()


def _point_outside(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../etc/passwd"
    path.write_text(json.dumps(index))


def _leave_only_pickle(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _unknown_model_type(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "no-such-type"}')


def _no_causal_model(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "t5"}')


def _config_not_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


def _no_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _garble_header,
        _remove_shard,
        _point_outside,
        _leave_only_pickle,
        _unknown_model_type,
        _no_causal_model,
        _config_not_json,
        _no_tokenizer,
    ],
)
def test_damaged_checkpoints(
    capsys: pytest.CaptureFixture[str],
    models: Models,
    tmp_path: Path,
    damage: Callable[[Path], None],
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(models.target, damaged)
    before = sorted(path.name for path in damaged.iterdir())
    damage(damaged)
    expect_error(capsys, ["run", "-m", str(damaged), "-p", "a", "-n", "2"])
    assert {path.name for path in damaged.iterdir()} <= {*before, "pytorch_model.bin"}


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-m", "/nonexistent/model", "-p", "a", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_prompt_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], models: Models
) -> None:
    expect_error(capsys, models.run_argv("-f", "/proc/self/mem"), "cannot read /proc/self/mem: ")


def test_a_prompt_from_a_pipe_that_does_not_block_is_read_to_its_end() -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    text = b"a" * 100_000  # more than the pipe holds: a read that does not wait gets a part
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

    told: list[bool] = []

    class Serving:
        def __init__(self, *_: object, is_debug: bool) -> None:
            told.append(is_debug)

        def run(self) -> int:
            return 0

    monkeypatch.setattr(serve, "_import_server", lambda: Serving)
    for value in ("1", "0"):
        monkeypatch.setenv("SPECDEC_DEBUG", value)
        assert main(["serve", "-m", "pair:target"]) == 0
    assert told == [True, False]
