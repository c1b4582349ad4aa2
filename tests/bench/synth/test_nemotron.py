"""A grown NemotronH computes the small one's function: Mamba-2, attention, MLPs as experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from grown_models import HEAD_DIM, altered, assert_same_function, save_source_with_tokenizer

import specdec
from bench.commands.app import main
from bench.synth.checkpoint import grow
from bench.synth.gguf import grow_gguf
from bench.synth.growth import layer_places
from bench.synth.layouts import LAYOUTS
from bench.synth.recipes import RECIPES
from bench.synth.shapes import HYBRIDS, Experts, LlamaShape, Mamba, Storage, SynthError
from bench.synth.sizing import choose_shape
from bench.synth.source import SourceModel
from specdec.sampling.params import SamplingParams

N_VOCAB = 280
FEW = Mamba("M-M*-M", 4, 2, 8, 16, 4)
SMALL = LlamaShape(32, 48, 6, 4, 2, HEAD_DIM, N_VOCAB, tied=True, mamba=FEW)
MANY = Mamba("M-M-M*-M", 6, 3, 8, 16, 4)
LARGE = LlamaShape(96, 80, 11, 6, 3, HEAD_DIM, 300, tied=False, mamba=MANY)
MIXTURE = altered(LARGE, experts=Experts(8, 3, 24), mamba=replace(MANY, pattern="MEMEM*EM"))
SHAPES = {"dense": LARGE, "mixture": MIXTURE, "more layers": altered(SMALL, n_layers=9)}
NANO = HYBRIDS["nemotron-3-nano"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_the_small_models(source: Path, tmp_path: Path, shape: LlamaShape) -> None:
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    assert_same_function(source, report.path, N_VOCAB)
    if shape.experts is None:
        written = SourceModel(report.path).shape.mamba
        kinds = [shape.mamba.kind_of(i) for i in range(shape.n_layers)]  # type: ignore[union-attr]
        assert written == replace(MANY if shape is LARGE else FEW, pattern="".join(kinds))


@pytest.mark.gguf
@pytest.mark.parametrize("shape", [*SHAPES.values(), SMALL], ids=[*SHAPES, "the small one"])
def test_llama_cpp_computes_the_small_model(
    source: Path, tmp_path: Path, shape: LlamaShape
) -> None:
    pytest.importorskip("llama_cpp")
    from gguf_logits import gguf_logits
    from transformers import AutoModelForCausalLM

    path = tmp_path / "grown.gguf"
    grow_gguf(source, path, shape, dtype="fp32")
    ids = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    got = gguf_logits(path, ids)[:, :N_VOCAB]
    assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


@pytest.mark.gguf
def test_it_runs_and_drafts_as_the_small_one(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    greedy = SamplingParams(max_tokens=16, ignore_eos=True)
    grow(source, tmp_path / "grown", MIXTURE, dtype="fp32")
    grow_gguf(source, tmp_path / "grown.gguf", MIXTURE, dtype="fp32")
    sequences = set()
    for path in (source, tmp_path / "grown", tmp_path / "grown.gguf"):
        with specdec.load(path, spec_type="ngram", ctx_size=96, threads=1) as llm:
            sequences.add(llm.generate([5, 9, 5, 9, 5, 9, 77], greedy).token_ids)
    assert len(sequences) == 1


@pytest.mark.gguf
@pytest.mark.slow_except(1)
@pytest.mark.parametrize("dtype", ["q4_k_m", "q5_k_m", "q6_k", "q8_0", "q4_0", "iq4_xs", "mxfp4"])
def test_types_are_llama_quantizes(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("llama_cpp")
    from llama_quantize import both_types

    few = Mamba("M-M*-M", 4, 2, 32, 64, 4)
    small = LlamaShape(256, 256, 6, 4, 2, 64, N_VOCAB, tied=True, mamba=few)
    folder = save_source_with_tokenizer(tmp_path / "small", small)
    shape = altered(
        small,
        hidden_size=288,  # blocks of 256 do not fit
        n_layers=20,
        experts=Experts(4, 2, 512),
        intermediate_size=512,
        tied=False,
        mamba=replace(few, pattern="MEMEM*EM*E"),
    )
    own, llama = both_types(folder, tmp_path, shape, dtype)
    assert own == llama


def test_layers_lie_where_their_kind_does() -> None:
    places = layer_places(SMALL, NANO)
    assert list(places.values()) == list(range(SMALL.n_layers))
    assert all(NANO.kind_of(i) == SMALL.kind_of(layer) for i, layer in places.items())
    assert max(places) >= NANO.n_layers // 2


def test_the_shape_of_nano_is_as_large_as_its_model_card_says() -> None:
    assert NANO.parameters == pytest.approx(31.6e9, rel=0.01)
    kinds = [NANO.mamba.kind_of(i) for i in range(NANO.n_layers)]  # type: ignore[union-attr]
    assert [kinds.count(kind) for kind in "ME*"] == [23, 23, 6]


def test_parameters_are_those_of_the_tensors() -> None:
    assert NANO.experts is not None
    shape = altered(NANO, n_layers=7, experts=replace(NANO.experts, n=4))
    assert LAYOUTS["bf16"].model_bytes(shape) == 2 * shape.parameters


@pytest.mark.parametrize("storage", [LAYOUTS["bf16"], RECIPES["q4_k_m"]], ids=["bf16", "q4_k_m"])
def test_a_size_cuts_its_layers(storage: Storage) -> None:
    shape = choose_shape(SMALL, NANO, 12_000_000_000, None, storage)
    assert storage.model_bytes(shape) == pytest.approx(12e9, rel=0.25)


def test_it_is_not_grown_from_gated_deltanet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["synth", "--from", "pair:hybrid", "--like", "nemotron-3-nano", "-o", out]) != 0
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "python -m bench.train.nemotron" in line


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (altered(LARGE, mamba=replace(MANY, n_groups=1, n_heads=2)), "groups of Mamba-2 heads 2 >"),
        (altered(LARGE, mamba=replace(MANY, n_heads=3)), "heads of a group"),
        (altered(LARGE, mamba=replace(MANY, state_size=8)), "state sizes"),
        (altered(LARGE, mamba=replace(MANY, head_dim=16)), "head dimensions of Mamba-2"),
        (altered(LARGE, mamba=replace(MANY, kernel=3)), "kernels"),
        (altered(LARGE, mamba=replace(MANY, pattern="M-")), "no place"),
        (HYBRIDS["qwen3.8-27b"], "the shape has none"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: Path, tmp_path: Path, shape: LlamaShape, message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        grow(source, tmp_path / "grown", shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers_block_type": ["linear_attention", "moe"]}, "grown from a dense one"),
        ({"layers_block_type": []}, "not listed"),
        ({"use_conv_bias": False}, "use_conv_bias True"),
    ],
)
def test_a_source_of_another_kind_is_refused(
    source: Path, changes: dict[str, object], message: str
) -> None:
    from bench.synth.source import source_shape

    with pytest.raises(SynthError, match=message):
        source_shape(SourceModel(source).config | changes)
