"""A grown model computes the small model's function."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from grown_models import HEAD_DIM, LARGE, SMALL, altered, assert_same_function, save_source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bench.synth.checkpoint import grow
from bench.synth.growth import layer_places, map_heads
from bench.synth.shapes import LlamaShape, SynthError
from specdec.models.opened import PADDING_KEY


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("small"), SMALL)


CASES = {
    "wider": altered(SMALL, hidden_size=80),
    "more layers": altered(SMALL, n_layers=7),
    "larger mlp": altered(SMALL, intermediate_size=200),
    "grouped to one head per key": altered(LARGE, n_heads=6, n_kv_heads=6),
    "grouped to larger groups": altered(LARGE, n_heads=16, n_kv_heads=2),
    "grouped to more groups": altered(LARGE, n_heads=10, n_kv_heads=5),
    "padded vocabulary": altered(LARGE, vocab_size=131),
    "everything": altered(LARGE, n_heads=12, n_kv_heads=4, vocab_size=200),
}


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
def test_grown_logits_equal_the_small_models(
    source: Path, tmp_path: Path, shape: LlamaShape
) -> None:
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    assert_same_function(source, report.path)
    config = json.loads((report.path / "config.json").read_text())
    is_padded = shape.vocab_size > SMALL.vocab_size
    assert config.get(PADDING_KEY) == (SMALL.vocab_size if is_padded else None)


@pytest.mark.parametrize("small_tied", [False, True])
@pytest.mark.parametrize("large_tied", [False, True])
def test_tying_is_retained_where_possible(
    tmp_path: Path, small_tied: bool, large_tied: bool
) -> None:
    small = save_source(tmp_path / "small", altered(SMALL, tied=small_tied))
    shape = altered(LARGE, tied=large_tied, vocab_size=120)
    report = grow(small, tmp_path / "grown", shape, dtype="fp32")
    assert report.shape.tied == (small_tied and large_tied)
    assert_same_function(small, report.path)


@pytest.mark.parametrize("is_same", [False, True])
def test_a_head_that_the_config_ties_counts_where_it_differs(tmp_path: Path, is_same: bool) -> None:
    small = save_source(tmp_path / "small", altered(SMALL, tied=True))
    path = small / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if is_same else -1)
    save_file(tensors, path, metadata={"format": "pt"})
    report = grow(small, tmp_path / "grown", altered(LARGE, tied=True), dtype="fp32")
    assert report.shape.tied == is_same
    assert_same_function(small, report.path)


def test_heads_are_cut_to_the_sources_size(source: Path, tmp_path: Path) -> None:
    shape = LlamaShape(128, 160, 3, 8, 4, 2 * HEAD_DIM, 96, tied=False)
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    assert (report.shape.n_heads, report.shape.n_kv_heads) == (16, 8)
    assert report.shape.parameters == shape.parameters
    assert_same_function(source, report.path)


@st.composite
def grown_pairs(draw: st.DrawFn) -> tuple[LlamaShape, LlamaShape]:
    """A small shape and a larger one that may not fit it."""
    kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grown_kv, grown_group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    heads, grown_heads = kv * group, grown_kv * grown_group
    # transformers requires hidden sizes that are multiples of the number of heads.
    d = heads * draw(st.integers(math.ceil(4 / heads), 4))
    f, n = draw(st.integers(4, 24)), draw(st.integers(1, 3))
    small = LlamaShape(d, f, n, heads, kv, 4, 96, tied=draw(st.booleans()))
    large = LlamaShape(
        grown_heads * (math.ceil(d / grown_heads) + draw(st.integers(0, 4))),
        f + draw(st.integers(0, 24)),
        n + draw(st.integers(0, 3)),
        grown_heads,
        grown_kv,
        4,
        96 + draw(st.integers(0, 9)),
        tied=draw(st.booleans()),
    )
    return small, large


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pair=grown_pairs(), seed=st.integers(0, 9))
def test_any_shape_keeps_the_function_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, pair: tuple[LlamaShape, LlamaShape], seed: int
) -> None:
    small, large = pair
    folder = tmp_path_factory.mktemp("case")
    save_source(folder / "small", small, seed)
    try:
        map_heads(small, large)
    except SynthError:
        with pytest.raises(SynthError, match="key/value heads"):
            grow(folder / "small", folder / "grown", large, dtype="fp32")
        return
    grow(folder / "small", folder / "grown", large, dtype="fp32", seed=seed)
    assert_same_function(folder / "small", folder / "grown")


def test_weights_are_real_numbers_except_where_zeros_are_needed(
    source: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder = grow(source, tmp_path / "grown", LARGE, dtype="bf16").path
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all(), name
        if not name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            assert (tensor == 0).float().mean() < 0.01, name
    places = layer_places(SMALL, LARGE)
    for index in range(LARGE.n_layers):
        o_proj = tensors[f"model.layers.{index}.self_attn.o_proj.weight"]
        assert bool(o_proj.any()) == (index in places)
        assert not o_proj[SMALL.hidden_size :].any()


def test_shards_hold_all_tensors_in_order(source: Path, tmp_path: Path) -> None:
    report = grow(source, tmp_path / "grown", LARGE, dtype="fp32", shard_bytes=100_000)
    assert report.n_files > 2
    index = json.loads((report.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.n_bytes == report.shape.n_bytes(4)
    files = list(index["weight_map"].values())
    assert files == sorted(files)
    assert set(files) == {path.name for path in report.path.glob("*.safetensors")}
    on_disk = sum(path.stat().st_size for path in report.path.glob("*.safetensors"))
    assert report.n_bytes < on_disk < report.n_bytes + 20_000  # headers
    assert_same_function(source, report.path)


def test_the_seed_decides_every_byte(source: Path, tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        folder = grow(source, tmp_path / name, LARGE, seed=seed).path
        return (folder / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1)
    assert weights("a2", 1) != weights("c", 2)


def test_the_card_says_what_was_grown(source: Path, tmp_path: Path) -> None:
    folder = grow(source, tmp_path / "grown", LARGE, source_name="pair:target").path
    card = (folder / "README.md").read_text()
    assert "Grown from pair:target" in card
    assert "not** a trained large model" in card
