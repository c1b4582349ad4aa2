"""GGUF headers of every kind are read as they were written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import gguf_bytes as gb
import numpy as np
import pytest
from gguf_reading import I8, one_tensor, read

from offload.formats import gguf_metadata
from offload.formats.gguf_header import GGML_TYPES, GgufError, GgufFile, row_bytes

SCALARS = {
    "u8": 200, "i8": -100, "u16": 60000, "i16": -30000, "u32": 2**32 - 1, "i32": -(2**31),
    "f32": 0.5, "bool": True, "str": "caf\u00e9 \U0001f600", "u64": 2**64 - 1, "i64": -(2**63),
    "f64": 1e300,
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_of_value(tmp_path: Path, version: int) -> None:
    pairs = [gb.pair(f"a.{kind}", kind, item) for kind, item in SCALARS.items()]
    pairs += [gb.pair(f"l.{kind}", f"[{kind}]", [item] * 3) for kind, item in SCALARS.items()]
    pairs += [gb.pair(f"e.{kind}", f"[{kind}]", []) for kind in SCALARS]
    file = read(tmp_path, gb.gguf(pairs, version=version))
    assert (file.version, file.tensors, file.alignment) == (version, (), 32)
    assert len(file.metadata) == 3 * len(SCALARS)
    for kind, item in SCALARS.items():
        assert file.metadata[f"a.{kind}"] == item
        assert type(file.metadata[f"a.{kind}"]) is type(item)
        assert file.metadata[f"l.{kind}"] == [item] * 3
        assert type(file.metadata[f"l.{kind}"][0]) is type(item)  # type: ignore[index]
        assert file.metadata[f"e.{kind}"] == []
        assert file.metadata.type_name(f"a.{kind}") == kind
        assert file.metadata.type_name(f"l.{kind}") == f"arr[{kind}]"
        assert file.metadata.array_length(f"l.{kind}") == 3
        assert file.metadata.array_length(f"a.{kind}") is None
    assert file.metadata.array_length("missing") is None
    assert "missing" not in file.metadata
    with pytest.raises(KeyError):
        file.metadata["missing"]


def test_tensors_of_every_type(tmp_path: Path) -> None:
    shapes = {kind.name: (3, 2 * kind.block_size) for kind in GGML_TYPES.values()}
    content = gb.make_file({}, {name: (name, shape) for name, shape in shapes.items()})
    file = read(tmp_path, content)
    assert [record.name for record in file.tensors] == list(shapes)
    for number, record in enumerate(file.tensors):
        assert (record.dtype, record.shape) == (record.name, shapes[record.name])
        assert record.n_bytes == 3 * row_bytes(record.dtype, record.shape[1])
        assert record.offset % 32 == 0
        data = content[record.offset : record.offset + record.n_bytes]
        assert data == bytes([number]) * record.n_bytes
    assert file.tensors[0].offset == file.data_offset


@pytest.mark.parametrize("alignment", [1, 8, 4096, 2**20])
def test_other_alignments(tmp_path: Path, alignment: int) -> None:
    tensors = {"a": ("I8", (3,)), "b": ("I8", (1,)), "c": ("F32", (2, 2, 2, 5))}
    keys = {"general.alignment": ("u32", alignment)}
    file = read(tmp_path, gb.make_file(keys, tensors, alignment=alignment))
    assert file.alignment == alignment
    assert [r.offset % alignment for r in file.tensors] == [0, 0, 0]
    assert file.tensors[2].shape == (2, 2, 2, 5)


def test_no_dimensions_no_padding_at_the_end_and_bytes_after_it(tmp_path: Path) -> None:
    file = read(tmp_path, one_tensor((), data=bytes(4)))
    assert file.tensors[0].shape == ()
    assert file.tensors[0].n_bytes == 4
    assert read(tmp_path, one_tensor((5,), I8, data=bytes(5))).tensors[0].n_bytes == 5
    assert read(tmp_path, one_tensor((5,), I8, data=bytes(5000))).tensors[0].n_bytes == 5


def test_text_that_is_not_utf8_is_no_reason_to_refuse_a_model(tmp_path: Path) -> None:
    pairs = [
        gb.pair("general.author", "str", b"Andr\xe9"),
        gb.pair("tokens", "[str]", [b"\xff", b"ok", b""]),
    ]
    metadata = read(tmp_path, gb.gguf(pairs)).metadata
    assert metadata["general.author"] == "Andr\ufffd"
    assert metadata["tokens"] == ["\udcff", "ok", ""]


def test_long_strings_and_arrays_across_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    sequences = ["x" * int(n) for n in rng.integers(0, 300, 400)]
    pairs = [
        gb.pair("tokens", "[str]", sequences),
        gb.pair("long", "str", "y" * 20_000),
        gb.pair("scores", "[f32]", [0.5] * 3000),
        gb.pair("after", "u8", 7),
    ]
    content = gb.gguf(pairs, [gb.tensor("t", (3,), I8, 0)], b"abc")
    for window in (16, 17, 64, 1000, 2**20):
        monkeypatch.setattr(gguf_metadata, "_WINDOW_BYTES", window)
        file = read(tmp_path, content)
        assert file.metadata["tokens"] == sequences
        assert file.metadata["long"] == "y" * 20_000
        assert file.metadata["scores"] == [0.5] * 3000
        assert file.metadata["after"] == 7
        assert content[file.tensors[0].offset :] == b"abc"


def test_a_large_vocabulary_costs_no_memory_until_asked_for(tmp_path: Path) -> None:
    n_tokens = 100_000
    tokens = b"".join(gb.string(f"token{i:060d}") for i in range(n_tokens))
    content = gb.gguf([gb.raw_array("tokens", gb.CODES["str"], n_tokens, tokens)])
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        metadata = GgufFile.read(path).metadata
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20 < len(tokens)
    assert metadata.array_length("tokens") == n_tokens
    assert metadata["tokens"] == [f"token{i:060d}" for i in range(n_tokens)]


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    content = gb.gguf([gb.pair("tokens", "[str]", ["abc", "def"])])
    metadata = read(tmp_path, content).metadata
    path = tmp_path / "m.gguf"
    path.write_bytes(content.replace(b"\3\0\0\0\0\0\0\0abc", b"\xff" * 11))
    with pytest.raises(GgufError, match="overwritten"):
        metadata["tokens"]
    path.write_bytes(content[:40])
    with pytest.raises(GgufError, match="shorter"):
        metadata["tokens"]
    path.unlink()
    with pytest.raises(GgufError, match="cannot read"):
        metadata["tokens"]
