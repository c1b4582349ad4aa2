"""Unusable model files: one clear line that names the file, whatever its content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import expect_error
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_pair import save_model

from backends.contract.source import BackendOptions
from offload.errors import SpecdecError
from specdec.models.opened import open_model

SHARD = "model-00001-of-00005.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("files") / "model", seed=1)


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def _remove(pattern: str) -> Callable[[Path], None]:
    def remove(model: Path) -> None:
        for path in model.glob(pattern):
            path.unlink()

    return remove


def _write(name: str, text: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(text) and None


def _truncate(model: Path) -> None:
    shard = model / SHARD
    os.truncate(shard, shard.stat().st_size - 100)


def _garble_header(model: Path) -> None:
    with (model / SHARD).open("r+b") as file:
        file.write(b"\xff" * 8)


def _point_outside(model: Path) -> None:
    name = "model.embed_tokens.weight"
    index = {"metadata": {}, "weight_map": {name: "../../etc/passwd"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    _remove("*.safetensors")(model)


def _leave_only_pickle(model: Path) -> None:
    _remove("*.safetensors*")(model)
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")


DAMAGES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "cut weights": (_truncate, (SHARD, "bytes but its header describes", "download")),
    "garbled header": (_garble_header, (SHARD, "claims a header of 18446744073709551615 bytes")),
    "no weights": (_remove("*.safetensors"), (SHARD, "is missing", "download")),
    "weights elsewhere": (
        _point_outside,
        ("../../etc/passwd", "not a plain .safetensors file name"),
    ),
    "pickled weights": (
        _leave_only_pickle,
        ("only pickled weights", "convert them to safetensors"),
    ),
    "no such family": (
        _write("config.json", '{"model_type": "no-such-type"}'),
        ("config.json: the family no-such-type (model_type) is not known to transformers",),
    ),
    "code of its own": (
        _write("config.json", '{"model_type": "own", "auto_map": {"AutoConfig": "a.B"}}'),
        ("config.json: the family own is defined by code in the checkpoint", "never runs"),
    ),
    "no family": (_write("config.json", "{}"), ("config.json has no model_type",)),
    "empty config": (_write("config.json", " "), ("config.json is empty: fix it",)),
    "config that is a list": (_write("config.json", "[1]"), ("config.json is no JSON object",)),
    "config that is no text": (
        lambda model: (model / "config.json").write_bytes(b"{\xff}") and None,
        ("config.json is no UTF-8 text (byte 1): fix it",),
    ),
    "tokenizer that is cut": (
        _write("tokenizer.json", '{"model":'),
        ("tokenizer.json is not valid JSON (line 1, column 10): take the tokenizer files",),
    ),
    "no causal model": (
        _write("config.json", '{"model_type": "t5"}'),
        ("t5 is an encoder-decoder",),
    ),
    "config that is no JSON": (
        _write("config.json", "{"),
        ("config.json is not valid JSON (line 1",),
    ),
    "no tokenizer": (_remove("tokenizer*"), ("has no tokenizer.json", "copy the tokenizer")),
    "tokenizer settings of another kind": (
        _write("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "take the file of the original model"),
    ),
    "template that is no text": (
        _write("tokenizer_config.json", '{"chat_template": 5}'),
        ("chat_template in tokenizer_config.json is 5",),
    ),
    "generation settings that are cut": (
        _write("generation_config.json", '{"eos_token_id": '),
        ("generation_config.json is not valid JSON (line 1", "fix it or remove it"),
    ),
    "generation settings of another kind": (
        _write("generation_config.json", "[]"),
        ("generation_config.json", "fix it or remove it"),
    ),
    "an end that is no token": (
        _write("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", "eos_token_id is 'x'"),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, message = DAMAGES[name]
    damage(model)
    before = {path: path.read_bytes() for path in model.iterdir()}
    expect_error(capsys, ["run", "-m", str(model), "-p", "x", "-n", "2"], *message)
    assert {path: path.read_bytes() for path in model.iterdir()} == before


NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    SHARD,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    name=st.sampled_from(NAMES),
    at=st.integers(0, 4000),
    n_replaced=st.integers(0, 40),
    data=st.binary(max_size=12) | st.text('{}[]:,"0123456789eE-.ntf', max_size=6).map(str.encode),
)
def test_changed_bytes_are_taken_or_refused_in_one_line(
    saved: Path,
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    at: int,
    n_replaced: int,
    data: bytes,
) -> None:
    """The changes are anywhere in a file, or in the header of the weights."""
    model = shutil.copytree(saved, tmp_path_factory.mktemp("changed") / "model")
    path = model / name
    content = path.read_bytes()
    at %= len(content)
    path.write_bytes(content[:at] + data + content[at + n_replaced :])
    try:
        open_model(model, BackendOptions())
        said = ""
    except SpecdecError as error:
        said = str(error)
    shutil.rmtree(model)
    assert "\n" not in said


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


def test_an_absurd_number_of_layers_is_refused_where_only_words_are_compared(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = model / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 10**9}))
    argv = ["check", "-m", str(model), "-md", str(model)]
    expect_error(capsys, argv, "says 1000000000 layers, the checkpoint holds 3")
