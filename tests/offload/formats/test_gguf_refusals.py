"""GGUF files are untrusted: every defect gives one clear error.

The cases of llama.cpp's test-gguf, in its order, and more.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf_bytes as gb
import pytest
from gguf_reading import F32, HUGE, I8, I64, Q4_0, Q4_K, one_tensor, read, refused

from offload.formats import gguf_metadata
from offload.formats.gguf_header import GgufError, GgufFile
from offload.formats.tensors import CheckpointError


def test_header(tmp_path: Path) -> None:
    refused(tmp_path, gb.gguf(magic=b"FUGG"), r"begins with b'FUGG'")
    refused(tmp_path, b"PK\3\4" + bytes(100), "no GGUF file")
    refused(tmp_path, gb.gguf(version=0), "version 0")
    refused(tmp_path, gb.gguf(version=1), "version 1")
    refused(tmp_path, gb.gguf(version=4), "version 4")
    refused(tmp_path, gb.gguf(version=2**32 - 1), "version 4294967295")
    for version in (1, 2, 3):
        refused(tmp_path, gb.gguf(version=version << 24), "big-endian")
    for count in (HUGE, 2**63, 2**40, 2**16 + 1):
        refused(tmp_path, gb.gguf(n_tensors=count), f"claims {count} tensors; at most 65536")
        refused(tmp_path, gb.gguf(n_pairs=count), f"claims {count} key-value pairs; at most 16384")
    refused(tmp_path, gb.gguf(n_tensors=100), "claims 100 tensors, too many for its")
    refused(tmp_path, gb.gguf(n_pairs=100), "claims 100 key-value pairs, too many for its")
    assert len(read(tmp_path, gb.gguf()).tensors) == 0


def test_keys(tmp_path: Path) -> None:
    ok = gb.raw_pair("k", 0, b"\1")
    for n_bytes in (HUGE, 2**63, 2**30, 1025):
        bad = struct.pack("<Q", n_bytes) + ok[8:] + bytes(2000)
        refused(tmp_path, gb.gguf([bad]), f"metadata key of {n_bytes} bytes; 1 to 1024")
    refused(tmp_path, gb.gguf([gb.raw_pair("", 0, b"\1")]), "metadata key of 0 bytes")
    refused(tmp_path, gb.gguf([ok, gb.pair("k", "str", "x")]), "the metadata key 'k' twice")
    for bad_key in (b"\xff\xfe", b"a\nb", b"a\0", "a\u2028b".encode()):
        refused(tmp_path, gb.gguf([gb.raw_pair(bad_key, 0, b"\1")]), "not printable UTF-8")
    assert read(tmp_path, gb.gguf([gb.raw_pair("k" * 1024, 0, b"\1")])).metadata["k" * 1024] == 1


def test_values(tmp_path: Path) -> None:
    for code in (13, 255, 2**31, 2**32 - 1):
        refused(tmp_path, gb.gguf([gb.raw_pair("k", code, b"\1")]), f"unknown type {code} in 'k'")
        refused(tmp_path, gb.gguf([gb.raw_array("k", code, 1)]), f"unknown type {code} in 'k'")
    nested = gb.raw_array("k", gb.CODES["arr"], 1, struct.pack("<IQ", 0, 1) + b"\1")
    refused(tmp_path, gb.gguf([nested]), "array of arrays in 'k'")
    for count in (HUGE, 2**63, 2**30, 2**22 + 1):
        for kind in ("u8", "f64", "str"):
            bad = gb.raw_array("k", gb.CODES[kind], count, bytes(64))
            refused(tmp_path, gb.gguf([bad]), f"claims {count} elements in 'k'; at most 4194304")
    for kind, count in (("u64", 20), ("str", 4096)):
        cut = gb.raw_array("k", gb.CODES[kind], count, bytes(64))
        refused(tmp_path, gb.gguf([cut]), "seems to be cut; download it again")
    for length in (HUGE, 2**63, 2**26 + 1):
        prefix = struct.pack("<Q", length)
        refused(tmp_path, gb.gguf([gb.raw_pair("k", 8, prefix)]), f"string of {length} bytes")
        inside = gb.raw_array("k", 8, 2, gb.string("ok") + prefix)
        refused(tmp_path, gb.gguf([inside]), f"string of {length} bytes")
    prefix = struct.pack("<Q", 2**20)
    refused(tmp_path, gb.gguf([gb.raw_pair("k", 8, prefix)]), "ends inside its header")
    refused(tmp_path, gb.gguf([gb.raw_array("k", 8, 1, prefix)]), "ends inside its header")


def test_alignment(tmp_path: Path) -> None:
    for bad in (0, 3, 13, 48, 2**21, 2**31, 2**32 - 1):
        content = gb.gguf([gb.pair("general.alignment", "u32", bad)])
        refused(tmp_path, content, f"general.alignment {bad}, not a power of two")
    for kind, item in (("i32", 32), ("u64", 32), ("str", "32"), ("[u32]", [32]), ("bool", True)):
        refused(tmp_path, gb.gguf([gb.pair("general.alignment", kind, item)]), "it must be u32")


def test_tensor_names(tmp_path: Path) -> None:
    ok = gb.tensor("t", (8,), F32, 0)
    for n_bytes in (HUGE, 2**63, 2**30, 64):
        bad = struct.pack("<Q", n_bytes) + ok[8:]
        content = gb.gguf(tensors=[bad], data=bytes(200))
        refused(tmp_path, content, f"tensor name of {n_bytes} bytes; 1 to 63")
    refused(tmp_path, one_tensor(name=""), "tensor name of 0 bytes")
    refused(tmp_path, one_tensor(name=b"a\0b"), "not printable")
    assert read(tmp_path, one_tensor(name="x" * 63)).tensors[0].name == "x" * 63
    twice = [ok, gb.tensor("t", (8,), F32, 32)]
    refused(tmp_path, gb.gguf(tensors=twice, data=bytes(64)), "the tensor 't' twice")


def test_tensor_shapes(tmp_path: Path) -> None:
    for rank in (5, 2**31, 2**32 - 1):
        bad = gb.string("t") + struct.pack("<I", rank) + bytes(200)
        refused(tmp_path, gb.gguf(tensors=[bad]), f"with {rank} dimensions; at most 4")
    wrong = [(0,), (4, 0), (-1,), (4, -1), (2**63,), (2**62, 2), (2**31, 2**31, 2**31, 2**31)]
    for ne in wrong:
        refused(tmp_path, one_tensor(ne, I8), "empty, negative or too large")
    refused(tmp_path, one_tensor((2**63 - 1,), I64), "incomplete")
    refused(tmp_path, one_tensor((3_037_000_500 - 1,) * 2, I64), "incomplete")
    for code in (4, 5, 31, 36, 42, 2**31, 2**32 - 1):
        refused(tmp_path, one_tensor(code=code), f"of the unknown type {code}")
    refused(tmp_path, one_tensor((33,), Q4_0), "33 elements per row.*Q4_0 blocks of 32")
    refused(tmp_path, one_tensor((32, 8), Q4_K), "32 elements per row.*Q4_K blocks of 256")
    refused(tmp_path, one_tensor((), Q4_0), "1 elements per row")


def test_tensor_offsets(tmp_path: Path) -> None:
    refused(tmp_path, one_tensor(offset=HUGE), "not aligned to 32")
    refused(tmp_path, one_tensor(offset=2**64 - 32), "hole")
    refused(tmp_path, one_tensor(offset=1), "not aligned")

    def two(second: int, n_bytes: int = 40) -> bytes:
        tensors = [gb.tensor("a", (n_bytes,), I8, 0), gb.tensor("b", (8,), I8, second)]
        return gb.gguf(tensors=tensors, data=bytes(256))

    refused(tmp_path, two(40), "'b' at 40, which is not aligned")
    refused(tmp_path, two(0), "'b' at 0, where it overlaps")
    refused(tmp_path, two(32), "'b' at 32, where it overlaps")
    refused(tmp_path, two(96), "'b' at 96, after a hole that begins at 64")
    assert len(read(tmp_path, two(64)).tensors) == 2
    # The file's alignment is larger than that used for its offsets.
    keys = {"general.alignment": ("u32", 64)}
    tensors = {"a": ("I8", (3,)), "b": ("I8", (3,))}
    refused(tmp_path, gb.make_file(keys, tensors, alignment=32), "'b' at 32, which is not aligned")


def test_data(tmp_path: Path) -> None:
    content = gb.make_file({}, {"a": ("I8", (40,)), "b": ("I8", (8,))})
    end = len(content) - 24  # 8 of 32 bytes are used
    assert read(tmp_path, content[:end]).tensors[1].name == "b"
    refused(tmp_path, content[: end - 1], "'b' ends at .*incomplete")
    refused(tmp_path, content[: -len(content) + 100], "incomplete|too few|inside its header")
    big = 0x7FFFFFFFFFFFFFC0
    both = [gb.tensor("a", (big,), I8, 0), gb.tensor("b", (big,), I8, big)]
    refused(tmp_path, gb.gguf(tensors=both, data=bytes(32)), "'a' ends at")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    metadata = {"a": ("str", "text"), "b": ("[str]", ["x", "yz"]), "c": ("[u32]", [1, 2])}
    content = gb.make_file(metadata, {"t": ("F32", (2, 3)), "u": ("Q8_0", (1, 32))})
    last = read(tmp_path, content).tensors[-1]
    end = last.offset + last.n_bytes
    for n_bytes in range(end):
        refused(tmp_path, content[:n_bytes], "too few|too many for its|inside its|left|incomplete")


def test_limits_of_the_whole_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_metadata, "MAX_STRINGS", 10)
    five = gb.raw_array("a", 8, 5, bytes(40))
    assert len(read(tmp_path, gb.gguf([five, gb.raw_array("b", 8, 5, bytes(40))])).metadata) == 2
    refused(tmp_path, gb.gguf([five, gb.raw_array("b", 8, 6, bytes(48))]), "more than 10 strings")
    monkeypatch.setattr(gguf_metadata, "MAX_HEADER_BYTES", 1024)
    pairs = [gb.raw_array(f"k{i}", 0, 300, bytes(300)) for i in range(4)]
    refused(tmp_path, gb.gguf(pairs, data=bytes(4096)), r"more than 1.00 KiB|and .* are left")
    pairs = [gb.raw_pair(f"k{i}", 8, gb.string("x" * 250)) for i in range(4)]
    refused(tmp_path, gb.gguf(pairs, data=bytes(4096)), r"a header of more than 1.00 KiB")


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="cannot read .*No such file"):
        GgufFile.read(tmp_path / "missing.gguf")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile.read(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GgufError, match="not a regular file"):
        GgufFile.read(tmp_path / "pipe.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match="has 0 bytes, too few"):
        GgufFile.read(tmp_path / "empty.gguf")
