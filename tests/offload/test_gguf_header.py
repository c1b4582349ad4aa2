"""GGUF files are untrusted: everything wrong about one gives one clear error."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import tracemalloc
from pathlib import Path

import gguf_bytes as gb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import gguf_metadata
from offload.gguf_header import GGML_TYPES, GgufError, GgufFile, row_bytes
from offload.index import CheckpointError

F32, I8, I64, Q4_0, Q4_K = 0, 24, 27, 2, 12
HUGE = 2**64 - 1


def read(folder: Path, content: bytes) -> GgufFile:
    path = folder / "m.gguf"
    path.unlink(missing_ok=True)  # overwriting would make ext4 write the old content out first
    path.write_bytes(content)
    return GgufFile.read(path)


def refused(folder: Path, content: bytes, match: str) -> None:
    with pytest.raises(GgufError, match=match) as caught:
        read(folder, content)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600 + len(str(folder))


def one_tensor(ne=(4,), code=F32, offset=0, name="t", **kwargs) -> bytes:
    data = kwargs.pop("data", bytes(64))
    return gb.gguf(tensors=[gb.tensor(name, ne, code, offset)], data=data, **kwargs)


# --- what works --------------------------------------------------------------------------------

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
    texts = ["x" * int(n) for n in rng.integers(0, 300, 400)]
    pairs = [
        gb.pair("tokens", "[str]", texts),
        gb.pair("long", "str", "y" * 20_000),
        gb.pair("scores", "[f32]", [0.5] * 3000),
        gb.pair("after", "u8", 7),
    ]
    content = gb.gguf(pairs, [gb.tensor("t", (3,), I8, 0)], b"abc")
    for window in (16, 17, 64, 1000, 2**20):
        monkeypatch.setattr(gguf_metadata, "_WINDOW_BYTES", window)
        file = read(tmp_path, content)
        assert file.metadata["tokens"] == texts
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


# --- what is refused: the cases of llama.cpp's test-gguf, in its order, and more -----------------


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
    refused(tmp_path, gb.gguf([gb.raw_array("k", gb.CODES["u64"], 20, bytes(64))]), "claims 20 ele")
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
    # The file's alignment is larger than what its offsets were made with.
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


# --- random damage -------------------------------------------------------------------------------

BASE = gb.make_file(
    {
        "general.architecture": ("str", "llama"),
        "general.alignment": ("u32", 32),
        "tokens": ("[str]", ["a", "bc", "", "def"]),
        "scores": ("[f32]", [0.0, 1.5]),
        "flag": ("bool", True),
    },
    {"blk.0.w": ("Q4_0", (2, 32)), "blk.1.w": ("F32", (3,)), "x": ("I8", (1, 2, 3))},
)
NUMBERS = st.sampled_from([0, 1, 2, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, HUGE])


def read_or_error(path: Path) -> GgufFile | GgufError:
    try:
        file = GgufFile.read(path)
        assert len(dict(file.metadata)) == len(file.metadata)  # every value can be decoded
    except GgufError as error:
        return error
    return file


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(BASE) - 1),
            st.binary(min_size=1, max_size=9) | NUMBERS,
            st.booleans(),
        ),
        max_size=4,
    ),
    st.integers(0, len(BASE) + 40),
)
def test_random_damage_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[int, bytes | int, bool]],
    length: int,
) -> None:
    content = bytearray(BASE)
    for at, patch, insert in edits:
        raw = struct.pack("<Q", patch) if isinstance(patch, int) else patch
        content[at : at if insert else at + len(raw)] = raw
    content = bytearray(content[:length])
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    tracemalloc.start()
    try:
        outcome = read_or_error(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    if isinstance(outcome, GgufError):
        assert "\n" not in str(outcome)
        assert len(str(outcome)) < 600 + len(str(path))
    else:
        end = outcome.data_offset
        for record in outcome.tensors:
            assert (record.offset - outcome.data_offset) % outcome.alignment == 0
            assert end <= record.offset
            end = record.offset + record.n_bytes
            assert end <= len(content)
    assert peak < 2**20 + 64 * len(content)


# --- the gguf package ----------------------------------------------------------------------------


@pytest.mark.gguf
def test_types_are_those_of_the_gguf_package() -> None:
    constants = pytest.importorskip("gguf.constants")
    theirs = {int(code): (code.name, *sizes) for code, sizes in constants.GGML_QUANT_SIZES.items()}
    assert {code: tuple(kind) for code, kind in GGML_TYPES.items()} == theirs


@pytest.mark.gguf
def test_what_passes_here_passes_in_llama_cpp(tmp_path: Path) -> None:
    package = pytest.importorskip("llama_cpp")
    path = Path(package.__file__).parent / "lib" / "libggml-base.so"
    if not path.exists():
        pytest.skip(f"no {path}")
    library = ctypes.CDLL(str(path))

    class Params(ctypes.Structure):
        _fields_ = [("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p)]

    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, Params]
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.gguf_free.argtypes = [ctypes.c_void_p]
    rng = random.Random(0)
    n_read = 0
    for number in range(2000):
        content = bytearray(BASE)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(content))
            raw = struct.pack("<I", rng.choice((0, 1, 2, 3, 8, 9, 32, 64, 255, 2**31, 2**32 - 1)))
            flipped = bytes([content[at] ^ (1 << rng.randrange(8))])
            patch = rng.choice((raw, flipped, rng.randbytes(2)))
            content[at : at + len(patch)] = patch
        damaged = tmp_path / str(number)
        damaged.write_bytes(content)
        if isinstance(read_or_error(damaged), GgufFile):
            n_read += 1
            context = library.gguf_init_from_file(str(damaged).encode(), Params(True, None))
            assert context, content
            library.gguf_free(context)
        damaged.unlink()
    assert 200 < n_read < 1800


@pytest.mark.gguf
@pytest.mark.parametrize("alignment", [32, 4096])
def test_files_of_the_gguf_package(tmp_path: Path, alignment: int) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(3)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count_kv([1, 2, 3])
    tokens = [f"\u0120{i}" for i in range(1000)]
    writer.add_token_list(tokens)
    writer.add_token_scores([float(i) for i in range(1000)])
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages }}\n" * 1000)
    arrays = {
        "blk.0.a.weight": rng.normal(size=(7, 64)).astype(np.float32),
        "blk.0.b.weight": rng.normal(size=(3, 5, 32)).astype(np.float16),
        "odd": rng.integers(0, 9, 5).astype(np.int8),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    quantized = gguf.quants.quantize(arrays["blk.0.a.weight"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile.read(path)
    assert file.alignment == alignment
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.attention.head_count_kv"] == [1, 2, 3]
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == float(np.float32(1e-5))
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
    assert file.metadata["tokenizer.ggml.scores"] == [float(i) for i in range(1000)]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is False
    assert file.metadata["tokenizer.chat_template"] == "{{ messages }}\n" * 1000
    content = path.read_bytes()
    records = {record.name: record for record in file.tensors}
    assert list(records) == [*arrays, "q"]
    for name, array in arrays.items():
        record = records[name]
        assert record.shape == array.shape
        assert content[record.offset : record.offset + record.n_bytes] == array.tobytes()
    record = records["q"]
    assert (record.dtype, record.shape) == ("Q8_0", (7, 64))
    assert content[record.offset : record.offset + record.n_bytes] == quantized.tobytes()

    # The package's own reader finds the tensors at the same places.
    reader = gguf.GGUFReader(path)
    assert {t.name: t.data_offset for t in reader.tensors} == {
        name: record.offset for name, record in records.items()
    }
