"""Types and bytes of grown GGUF files equal those of llama.cpp's own quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from grown_models import altered, save_source_with_tokenizer
from llama_quantize import llama_quantize

from bench.synth.formats import Q4_K
from bench.synth.gguf import grow_gguf
from bench.synth.growth import Fill, Patch, TensorPlan
from bench.synth.recipes import RECIPES
from bench.synth.shapes import SHAPES, LlamaShape
from bench.synth.sizing import choose_shape
from bench.synth.weights import TensorMaker

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.gguf

SMALL = LlamaShape(256, 256, 2, 8, 4, 32, 280, tied=False)
DEEP = altered(SMALL, n_layers=16)
FLAT = LlamaShape(32, 32, 2, 1, 1, 32, 280, tied=False)  # for models of many layers
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38, 264, 271]
QUANTISED = [dtype for dtype in RECIPES if dtype not in ("f16", "bf16", "fp32")]
DTYPES = pytest.mark.parametrize("dtype", QUANTISED)

SHAPES_OF_RULES = {
    "first and last layers": DEEP,
    "small groups": altered(DEEP, n_kv_heads=8),
    "large groups": altered(DEEP, hidden_size=512, n_heads=16),
    "tied": altered(DEEP, tied=True),
    "blocks of 256 do not fit": altered(DEEP, hidden_size=288, n_heads=9, n_kv_heads=9),
    "blocks of 256 do not fit the MLP": altered(DEEP, intermediate_size=608),
    "no blocks fit": altered(DEEP, hidden_size=264, intermediate_size=300),
}


class File(NamedTuple):
    types: dict[str, str]
    data: dict[str, bytes]
    file_type: int


def read(path: Path) -> File:
    reader = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    data = {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}
    return File(types, data, int(reader.fields["general.file_type"].contents()))


def both_modes(
    folder: Path, tmp_path: Path, shape: LlamaShape, dtype: str, with_data: bool = True
) -> tuple[Path, Path]:
    """Written directly in a type, and written in F32 and quantised by llama.cpp."""
    own, floats = (
        grow_gguf(folder, tmp_path / f"{name}.gguf", shape, dtype=kind, with_data=with_data).path
        for name, kind in (("own", dtype), ("floats", "fp32"))
    )
    return own, llama_quantize(floats, tmp_path / "llama.gguf", dtype)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def tied_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(
        tmp_path_factory.mktemp("tied"), altered(SMALL, n_layers=1, tied=True)
    )


@pytest.mark.slow_except(2)
@DTYPES
def test_a_written_source_is_llama_quantizes_to_the_byte(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    own, llama = (read(path) for path in both_modes(source, tmp_path, SMALL, dtype))
    assert own == llama


@pytest.mark.slow_except(9)
@DTYPES
@pytest.mark.parametrize("shape", SHAPES_OF_RULES.values(), ids=SHAPES_OF_RULES)
def test_types_are_llama_quantizes(
    tied_source: Path, tmp_path: Path, shape: LlamaShape, dtype: str
) -> None:
    own, llama = (read(path) for path in both_modes(tied_source, tmp_path, shape, dtype, False))
    assert own.types == llama.types
    assert own.file_type == llama.file_type


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", ["q4_k_s", "q4_k_m"])
@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_llama_2_70bs_values_are_stored_more_precisely(
    tmp_path: Path, n_kv_heads: int, dtype: str
) -> None:
    """llama.cpp recognises it by its number of layers and its grouped heads."""
    folder = save_source_with_tokenizer(tmp_path / "small", FLAT)
    shape = altered(FLAT, hidden_size=256, n_layers=80, n_heads=2, n_kv_heads=n_kv_heads)
    own, llama = (read(path) for path in both_modes(folder, tmp_path, shape, dtype, False))
    assert own.types == llama.types
    kinds = {kind for name, kind in own.types.items() if "attn_v" in name}
    assert ("Q4_K" in kinds) == (n_kv_heads == 2)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", ["q4_k_m", "q5_k_m", "iq4_xs"])
def test_what_is_not_random_is_llama_quantizes_to_the_byte(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    shape = altered(SMALL, hidden_size=512, intermediate_size=768, n_heads=16, vocab_size=331)
    own, llama = (read(path) for path in both_modes(source, tmp_path, shape, dtype))
    written = ("norm", "token_embd", "attn_output", "ffn_down")
    names = [name for name in own.data if any(part in name for part in written)]
    assert len(names) == 2 + 4 * shape.n_layers
    assert all(own.data[name] == llama.data[name] for name in names)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", ["q4_k_m", "q5_k_m", "q6_k", "iq4_xs"])
def test_grown_text_is_that_of_llama_quantizes_file(
    source: Path, tmp_path: Path, dtype: str
) -> None:
    from gguf_logits import gguf_logits

    # No more heads: sharing a block with the small model's heads changes llama.cpp's rounding of
    # activations, as much as another text would.
    shape = altered(SMALL, hidden_size=512, intermediate_size=768, n_layers=5)
    own, llama = (gguf_logits(path, IDS) for path in both_modes(source, tmp_path, shape, dtype))
    np.testing.assert_allclose(own, llama, atol=1e-3 * llama.std())
    assert (own.argmax(1) == llama.argmax(1)).all()


@pytest.mark.slow_except(1)
@DTYPES
@pytest.mark.parametrize("n_bytes", [1_000_000_000, 6_000_000_000])
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_met_closely(dtype: str, n_bytes: int, tied: bool) -> None:
    target = LlamaShape(384, 1024, 6, 3, 3, 128, 4096, tied=tied)
    shape = choose_shape(target, None, n_bytes, None, RECIPES[dtype])
    assert RECIPES[dtype].model_bytes(shape) == pytest.approx(n_bytes, rel=0.02)
    assert shape.intermediate_size % RECIPES[dtype].block_size == 0


def test_known_shapes_have_the_published_sizes() -> None:
    """Sizes from llama.cpp's own table for Llama 2 7B: 3.80 GiB, 4.45 GiB, 5.15 GiB."""
    gib = {"q4_k_m": 3.80, "q5_k_m": 4.45, "q6_k": 5.15}
    sizes = {d: RECIPES[d].model_bytes(SHAPES["llama-2-7b"]) / 2**30 for d in gib}
    assert sizes == pytest.approx(gib, abs=0.006)


def test_no_more_than_four_mebibytes_of_floats_are_read_at_once() -> None:
    read_rows: list[range] = []

    def read(name: str, rows: range) -> np.ndarray:
        read_rows.append(rows)
        return np.zeros((len(rows), 1024), np.float32)

    plan = TensorPlan("x", (3000, 1024), Fill.ZERO, (Patch(0, 0, 3000, 1024, "y"),))
    maker = TensorMaker(read, lambda plan: Q4_K, seed=0)
    assert sum(chunk.nbytes for chunk in maker.chunks(plan)) == maker.n_bytes(plan)
    assert [len(rows) for rows in read_rows] == [1024, 1024, 952]
