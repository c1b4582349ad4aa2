"""A grown model computes the small model's function, and nothing half-written stays behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench import synth
from bench.growth import GrowthPlanner, layer_places, map_heads
from bench.shapes import SHAPES, LlamaShape, SynthError, shape_of_size
from bench.source_model import source_shape
from bench.synth import grow

HEAD_DIM = 8
SMALL = LlamaShape(32, 48, 2, 4, 2, HEAD_DIM, 96, tied=False)
LARGE = LlamaShape(240, 112, 5, 6, 3, HEAD_DIM, 96, tied=False)


def save_source(folder: Path, shape: LlamaShape, seed: int = 0, **options: object) -> Path:
    """Write a random fp32 Llama with weights large enough to tell layers apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        rms_norm_eps=1e-3,  # large, so that a wrong epsilon shows
        max_position_embeddings=128,
        **options,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38]])
    with torch.no_grad():
        return model(ids).logits[0]


def assert_same_function(source: Path, grown: Path, n_vocab: int = SMALL.vocab_size) -> None:
    wanted, got = logits_of(source), logits_of(grown)[:, :n_vocab]
    assert wanted.std() > 0.1  # else equality would say little
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("small"), SMALL)


def altered(shape: LlamaShape, **changes: object) -> LlamaShape:
    from dataclasses import replace

    return replace(shape, **changes)


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
    assert_same_function(source, report.folder)


@pytest.mark.parametrize("small_tied", [False, True])
@pytest.mark.parametrize("large_tied", [False, True])
def test_tying_is_kept_where_it_is_possible(
    tmp_path: Path, small_tied: bool, large_tied: bool
) -> None:
    small = save_source(tmp_path / "small", altered(SMALL, tied=small_tied))
    shape = altered(LARGE, tied=large_tied, vocab_size=120)
    report = grow(small, tmp_path / "grown", shape, dtype="fp32")
    assert report.shape.tied == (small_tied and large_tied)
    assert_same_function(small, report.folder)


def test_heads_are_cut_to_the_sources_size(source: Path, tmp_path: Path) -> None:
    shape = LlamaShape(128, 160, 3, 8, 4, 2 * HEAD_DIM, 96, tied=False)
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    assert (report.shape.n_heads, report.shape.n_kv_heads) == (16, 8)
    assert report.shape.parameters == shape.parameters
    assert_same_function(source, report.folder)


@st.composite
def grown_pairs(draw: st.DrawFn) -> tuple[LlamaShape, LlamaShape]:
    """A small shape and a larger one that it may or may not fit."""
    kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grown_kv, grown_group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    heads, grown_heads = kv * group, grown_kv * grown_group
    # transformers wants hidden sizes that are multiples of the number of heads.
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

    folder = grow(source, tmp_path / "grown", LARGE, dtype="bf16").folder
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    for name, tensor in tensors.items():
        assert torch.isfinite(tensor).all(), name
        if not name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
            assert (tensor == 0).float().mean() < 0.01, name
    places = layer_places(SMALL.n_layers, LARGE.n_layers)
    for index in range(LARGE.n_layers):
        o_proj = tensors[f"model.layers.{index}.self_attn.o_proj.weight"]
        assert bool(o_proj.any()) == (index in places)
        assert not o_proj[SMALL.hidden_size :].any()


def test_shards_hold_all_tensors_in_order(source: Path, tmp_path: Path) -> None:
    report = grow(source, tmp_path / "grown", LARGE, dtype="fp32", shard_bytes=100_000)
    assert report.n_shards > 2
    index = json.loads((report.folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.n_bytes == report.shape.n_bytes(4)
    files = list(index["weight_map"].values())
    assert files == sorted(files)
    assert set(files) == {path.name for path in report.folder.glob("*.safetensors")}
    on_disk = sum(path.stat().st_size for path in report.folder.glob("*.safetensors"))
    assert report.n_bytes < on_disk < report.n_bytes + 20_000  # headers
    assert_same_function(source, report.folder)


def test_the_seed_decides_every_byte(source: Path, tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        folder = grow(source, tmp_path / name, LARGE, seed=seed).folder
        return (folder / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1)
    assert weights("a2", 1) != weights("c", 2)


def test_the_card_says_what_was_grown(source: Path, tmp_path: Path) -> None:
    folder = grow(source, tmp_path / "grown", LARGE, source_name="pair:target").folder
    card = (folder / "README.md").read_text()
    assert "Grown from pair:target" in card
    assert "not** a trained large model" in card


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden size 32 > 16"),
        ({"intermediate_size": 16}, "intermediate size"),
        ({"n_layers": 1}, "number of layers"),
        ({"vocab_size": 50}, "vocabulary"),
        ({"n_kv_heads": 1, "n_heads": 6}, "key/value heads"),
        ({"n_heads": 7}, "no multiple"),
        ({"hidden_size": 241}, "hidden size 241"),
        ({"head_dim": 9, "n_kv_heads": 3}, "cannot be cut"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    source: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        grow(source, tmp_path / "grown", altered(LARGE, **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen2"}, "only Llama"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config"),
        ({"model_type": "llama", "num_attention_heads": 2}, "lacks 'hidden_size'"),
    ],
)
def test_sources_that_are_no_plain_llama_are_refused(
    config: dict[str, object], message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        source_shape(config)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SynthError, match=r"no config\.json"):
        grow(tmp_path, tmp_path / "grown", LARGE)


def test_a_full_disk_is_noticed_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: usage(10, 10, 1024))
    with pytest.raises(SynthError, match=r"needed, 1\.00 KiB free"):
        grow(source, tmp_path / "grown", LARGE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(28, "No space left on device"), SynthError), (KeyboardInterrupt(), BaseException)],
)
def test_nothing_half_written_stays(
    source: Path, tmp_path: Path, error: BaseException, expected: type[BaseException]
) -> None:
    def fail(n_bytes: int, total: int) -> None:
        if n_bytes > total / 2:
            raise error

    with pytest.raises(expected):
        grow(source, tmp_path / "grown", LARGE, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_when_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "grown"
    grow(source, out, LARGE)
    (out / "stale").write_text("old")
    with pytest.raises(SynthError, match="not empty"):
        grow(source, out, LARGE)
    assert (out / "stale").exists()
    grow(source, out, LARGE, force=True)
    assert not (out / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["grown"]


def test_force_spares_the_source_and_what_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SynthError, match="holds the source"):
        grow(source, source, LARGE, force=True)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(SynthError, match="no checkpoint"):
        grow(source, tmp_path, LARGE, force=True)
    assert (tmp_path / "letter.txt").exists()


@pytest.mark.parametrize("text", [1_000_000_000, 6_000_000_000, 13_000_000_000, 60_000_000_000])
@pytest.mark.parametrize("vocab_size", [None, 32_000])
def test_sizes_are_met_closely(text: int, vocab_size: int | None) -> None:
    shape = shape_of_size(text, vocab_size=vocab_size, min_layers=6, min_intermediate_size=1024)
    assert shape.n_bytes() == pytest.approx(text, rel=0.02)


def test_impossible_sizes_name_the_smallest_possible() -> None:
    with pytest.raises(SynthError, match="the smallest model of this width takes"):
        shape_of_size(10_000_000, min_layers=6, min_intermediate_size=1024)


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_can_hold_the_embedded_target(name: str) -> None:
    target = LlamaShape(384, 1024, 6, 3, 3, 128, 4096, tied=True)
    grown = SHAPES[name].with_head_dim(128)
    plans = GrowthPlanner(target, grown).tensors()
    assert sum(plan.n_weights for plan in plans) == grown.parameters


def test_known_shapes_have_the_published_number_of_parameters() -> None:
    assert SHAPES["llama-3.2-1b"].parameters == 1_235_814_400
    assert SHAPES["llama-3.2-3b"].parameters == 3_212_749_824
    assert SHAPES["llama-3-8b"].parameters == 8_030_261_248
    assert SHAPES["llama-2-7b"].parameters == 6_738_415_616
    assert SHAPES["llama-2-13b"].parameters == 13_015_864_320
