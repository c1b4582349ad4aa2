"""A grown hybrid of attention and recurrent layers computes the small one's function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from grown_models import HEAD_DIM, altered, assert_same_function, save_source_with_tokenizer

from bench.synth.checkpoint import grow
from bench.synth.growth import layer_places
from bench.synth.shapes import HYBRIDS, Experts, LlamaShape, Recurrent, SynthError
from bench.synth.source import SourceModel
from specdec.models.names import resolve_model
from specdec.text.tokenizer import Tokenizer

N_VOCAB = 280
FEW = Recurrent(2, 4, 16, 4, 3)
SMALL = LlamaShape(32, 48, 6, 4, 2, 4 * HEAD_DIM, N_VOCAB, tied=True, recurrent=FEW)
MANY = Recurrent(3, 9, 16, 4, 3)
LARGE = LlamaShape(96, 80, 12, 6, 3, 4 * HEAD_DIM, 300, tied=False, recurrent=MANY)
MIXTURE = altered(LARGE, experts=Experts(8, 3, 24))
SHAPES = {"dense": LARGE, "mixture": MIXTURE, "more layers": altered(SMALL, n_layers=9)}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_are_the_small_models(source: Path, tmp_path: Path, shape: LlamaShape) -> None:
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    assert_same_function(source, report.path, N_VOCAB)
    grown = SourceModel(report.path) if shape.experts is None else None
    assert grown is None or grown.shape == report.shape


def test_a_grown_mixture_reads_text_as_its_source(tmp_path: Path) -> None:
    """Transformers has a tokenizer class for mixtures, which splits text in its own way."""
    source = resolve_model("pair:hybrid")
    few = Recurrent(1, 2, 128, 4, 4)
    experts = Experts(2, 1, 32)
    shape = LlamaShape(256, 704, 4, 2, 1, 256, 4096, tied=False, experts=experts, recurrent=few)
    grow(source, tmp_path / "grown", shape)
    text = "class Stack:\n    def __init__(self):\n"
    expected = Tokenizer.from_pretrained(source).encode(text)
    assert Tokenizer.from_pretrained(tmp_path / "grown").encode(text) == expected


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_llama_cpp_computes_the_small_model(source: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("llama_cpp")
    from gguf_logits import gguf_logits
    from transformers import AutoModelForCausalLM

    from bench.synth.gguf import grow_gguf

    path = tmp_path / "grown.gguf"
    grow_gguf(source, path, SHAPES[kind], dtype="fp32")
    ids = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    got = gguf_logits(path, ids)[:, :N_VOCAB]
    assert np.abs(got - expected).max() < 5e-3 * np.abs(expected).max()


def test_layers_lie_where_their_kind_does() -> None:
    places = layer_places(SMALL, LARGE)
    assert list(places.values()) == list(range(SMALL.n_layers))
    assert all(LARGE.is_recurrent(i) == SMALL.is_recurrent(layer) for i, layer in places.items())
    assert max(places) >= LARGE.n_layers // 2


@pytest.mark.parametrize("name", HYBRIDS)
def test_parameters_are_those_of_the_tensors(name: str) -> None:
    from bench.synth.layouts import LAYOUTS

    shape = altered(HYBRIDS[name], n_layers=4)
    if shape.experts is not None:
        shape = altered(shape, experts=replace(shape.experts, n=4))
    assert LAYOUTS["bf16"].model_bytes(shape) == pytest.approx(2 * shape.parameters, rel=1e-4)


def test_the_large_shapes_are_as_large_as_their_names_say() -> None:
    assert HYBRIDS["qwen3.8-27b"].parameters == pytest.approx(27e9, rel=0.02)
    assert HYBRIDS["qwen3.6-35b-a3b"].parameters == pytest.approx(35e9, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (altered(LARGE, recurrent=None), "is none of attention and recurrent layers"),
        (altered(LARGE, recurrent=replace(MANY, n_key_heads=1)), "key heads 2 > 1"),
        (altered(LARGE, recurrent=replace(MANY, n_value_heads=3)), "value heads of a key head"),
        (altered(LARGE, recurrent=replace(MANY, head_dim=32)), "head dimensions"),
        (altered(LARGE, recurrent=replace(MANY, kernel=3)), "kernels"),
        (altered(LARGE, recurrent=replace(MANY, attention_every=12)), "no place"),
    ],
)
def test_what_does_not_fit_is_refused(
    source: Path, tmp_path: Path, shape: LlamaShape, message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        grow(source, tmp_path / "grown", shape)


def test_a_llama_does_not_become_a_hybrid(tmp_path: Path) -> None:
    llama = altered(SMALL, recurrent=None, n_heads=1, n_kv_heads=1)
    source = save_source_with_tokenizer(tmp_path / "llama", llama)
    with pytest.raises(SynthError, match="pair:hybrid"):
        grow(source, tmp_path / "grown", LARGE)
