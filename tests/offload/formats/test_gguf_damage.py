"""Random damage is read or refused; accepted files read as by the gguf package and llama.cpp."""

from __future__ import annotations

import ctypes
import random
import struct
import tracemalloc
from pathlib import Path

import gguf_bytes as gb
import numpy as np
import pytest
from gguf_reading import HUGE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.formats.gguf_header import GGML_TYPES, GgufError, GgufFile

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
