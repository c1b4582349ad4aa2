"""Hostile GGUF headers: every command that opens a model refuses them in the same line."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from command_line import expect_error
from gguf_models import save_tiny_gguf

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from specdec.text import gguf_tokenizer as gguf_text

pytestmark = pytest.mark.gguf
HOSTILE = [
    ("attention.head_count", 0, "attention.head_count of 0"),
    ("block_count", 0, "block_count of 0; 1 to 1024 are accepted"),
    ("block_count", 2**32 - 1, "block_count of 4294967295; 1 to 1024 are accepted"),
    ("embedding_length", 3, "for a hidden size of 3"),
    ("rope.dimension_count", 0, "rope.dimension_count of 0; 1 to 16384 are accepted"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf("llama", tmp_path_factory.mktemp("gguf") / "good.gguf", n_layers=2)


@pytest.fixture
def no_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ensure that llama.cpp's vocabulary loader never sees these files."""

    def refuse(path: Path) -> None:
        if "good" not in path.name:
            raise AssertionError("the vocabulary was loaded first")

    load = gguf_text.GgufTokenizer.from_file
    monkeypatch.setattr(
        gguf_text.GgufTokenizer,
        "from_file",
        lambda path, limits: refuse(path) or load(path, limits),
    )


def changed(good: Path, folder: Path, key: str, value: int) -> Path:
    """Return the same file with another number of 32 bits."""
    data, name = bytearray(good.read_bytes()), f"llama.{key}".encode()
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4
    data[at : at + 4] = struct.pack("<I", value)
    path = folder / "hostile.gguf"
    path.write_bytes(data)
    return path


def commands(path: Path, good: Path, folder: Path) -> dict[str, list[str]]:
    bad, well = str(path), str(good)
    return {
        "run": ["run", "-m", bad, "-p", "x"],
        "run with it as the draft": ["run", "-m", well, "-md", bad, "-p", "x"],
        "check": ["check", "-m", bad, "-md", well],
        "check with it as the draft": ["check", "-m", well, "-md", bad],
        "analyze": ["analyze", "-m", bad],
        "plan": ["plan", "-m", bad],
    }


@pytest.mark.parametrize(("key", "value", "reason"), HOSTILE)
def test_values_without_sense(
    good: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_llama: None,
    key: str,
    value: int,
    reason: str,
) -> None:
    path = changed(good, tmp_path, key, value)
    for argv in commands(path, good, tmp_path).values():
        expect_error(capsys, argv, str(path), reason)


def test_a_missing_part_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], good: Path, no_llama: None
) -> None:
    path = save_tiny_gguf("llama", tmp_path / "m.gguf", n_splits=3, n_layers=2)
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    for argv in commands(path, good, tmp_path).values():
        expect_error(capsys, argv, "1 are missing", "m-00002-of-00003.gguf is the first")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_an_empty_directory_is_refused_before_anything_heavy(
    side: str, tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pair = (empty, good) if side == "target" else (good, empty)
    before = {name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")}
    for command in (["run", "-p", "x"], ["check"]):
        argv = [command[0], "-m", str(pair[0]), "-md", str(pair[1]), *command[1:]]
        expect_error(capsys, argv, f"{empty} has no config.json: not a model directory")
    after = {name for name in sys.modules if name.split(".")[0] in ("torch", "transformers")}
    assert after == before
