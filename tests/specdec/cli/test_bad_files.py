"""Tokenizer and generation files that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import expect_error
from tiny_pair import save_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("files") / "model", seed=1)


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def test_no_tokenizer_files(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    expect_error(
        capsys, ["run", "-m", str(model), "-p", "x"], "has no tokenizer.json", "copy the tokenizer"
    )


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("tokenizer_config.json", "[]", "take the file of the original model"),
        (
            "tokenizer_config.json",
            '{"chat_template": 5}',
            "chat_template in tokenizer_config.json is 5",
        ),
        ("generation_config.json", '{"eos_token_id": ', "mend it or remove it"),
        ("generation_config.json", "[]", "mend it or remove it"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x'"),
    ],
)
def test_a_broken_file_is_named(
    model: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, remedy: str
) -> None:
    (model / name).write_text(text)
    expect_error(capsys, ["run", "-m", str(model), "-p", "x"], name, remedy)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "vocab.json", "new.jinja"]
)
@pytest.mark.parametrize("command", ["run", "plan", "check", "analyze"])
def test_a_file_of_the_model_that_is_a_fifo_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    more = {"run": ["-p", "x"], "check": ["-md", "pair:draft"]}.get(command, [])
    expect_error(capsys, [command, "-m", str(model), *more], f"{name} is not a regular file")


def test_a_device_profile_that_nobody_writes_to_is_not_waited_for(
    model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "device.json")
    argv = ["plan", "-m", str(model), "--on", str(tmp_path / "device.json")]
    expect_error(capsys, argv, "device.json is no JSON")


def test_an_absurd_number_of_layers_is_refused_where_only_words_are_compared(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 10**9}))
    argv = ["check", "-m", str(model), "-md", str(model)]
    expect_error(capsys, argv, "says 1000000000 layers, the checkpoint holds 3")
