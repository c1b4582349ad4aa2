"""A grown mixture computes the small one's function, with the same routing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from grown_models import HEAD_DIM, altered, save_source, save_source_with_tokenizer

from bench.synth.checkpoint import grow
from bench.synth.growth import layer_places
from bench.synth.shapes import MIXTURES, Experts, LlamaShape, SynthError

SMALL = LlamaShape(32, 48, 2, 4, 4, HEAD_DIM, 280, tied=True, experts=Experts(8, 3, 20))
LARGE = LlamaShape(96, 48, 5, 16, 8, HEAD_DIM, 300, tied=True, experts=Experts(16, 2, 24))
# Widths that K-quants fill, with the small model's heads in their own block.
WIDE = LlamaShape(768, 48, 5, 24, 24, 32, 300, tied=True, experts=Experts(8, 3, 256))
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38, 264, 271]


def outputs_of(folder: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits and the experts that each layer uses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, actual: chosen.append(actual[2]))
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0], chosen


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("small"), SMALL)


@pytest.mark.parametrize(
    "shape",
    [LARGE, altered(SMALL, n_layers=7), altered(SMALL, hidden_size=80), SMALL],
    ids=["everything", "more layers", "wider", "as it is"],
)
def test_logits_and_routing_are_the_small_models(
    source: Path, tmp_path: Path, shape: LlamaShape
) -> None:
    report = grow(source, tmp_path / "grown", shape, dtype="fp32")
    (expected, routes), (got, grown_routes) = outputs_of(source), outputs_of(report.path)
    assert expected.std() > 0.1
    torch.testing.assert_close(got[:, : SMALL.vocab_size], expected, atol=1e-4, rtol=1e-4)
    places = layer_places(SMALL, shape)
    for place, layer in places.items():
        assert torch.equal(grown_routes[place].sort(-1).values, routes[layer].sort(-1).values)
    for route in grown_routes:  # added layers route to experts as well
        assert 3 < len(route.unique()) <= 8


def test_the_bytes_of_experts_are_the_shapes_and_their_number_the_sources() -> None:
    small = replace(SMALL, experts=Experts(64, 4, 16))
    expected = MIXTURES["qwen3-30b-a3b"]
    shape = expected.with_routing_of(small)
    assert shape.experts == Experts(64, 4, 1536)
    assert shape.parameters == pytest.approx(expected.parameters, rel=0.001)


@pytest.mark.parametrize("kind", ["dense to mixture", "mixture to dense"])
def test_a_dense_model_and_a_mixture_do_not_become_each_other(
    source: Path, tmp_path: Path, kind: str
) -> None:
    dense = altered(LARGE, experts=None)
    if kind == "dense to mixture":
        source = save_source(tmp_path / "dense", altered(SMALL, experts=None))
        dense = LARGE
    with pytest.raises(SynthError, match="mixture of experts"):
        grow(source, tmp_path / "grown", dense)


def test_experts_cannot_shrink(source: Path, tmp_path: Path) -> None:
    shape = altered(LARGE, experts=Experts(8, 3, 16))
    with pytest.raises(SynthError, match="size of an expert 20 > 16"):
        grow(source, tmp_path / "grown", shape)


@pytest.fixture(scope="module")
def wide_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    shape = altered(SMALL, hidden_size=256, n_heads=8, n_kv_heads=8, head_dim=32)
    return save_source_with_tokenizer(tmp_path_factory.mktemp("small"), shape)


def gguf_logits_of(source: Path, path: Path, shape: LlamaShape, dtype: str) -> np.ndarray:
    from gguf_logits import gguf_logits

    from bench.synth.gguf import grow_gguf

    grow_gguf(source, path, shape, dtype=dtype)
    return gguf_logits(path, IDS)[:, : SMALL.vocab_size]


@pytest.mark.gguf
class TestGguf:
    def test_llama_computes_what_transformers_computes(
        self, wide_source: Path, tmp_path: Path
    ) -> None:
        expected = outputs_of(wide_source)[0].numpy()
        got = gguf_logits_of(wide_source, tmp_path / "grown.gguf", WIDE, "fp32")
        np.testing.assert_allclose(got, expected, atol=1e-3 * expected.std())

    def test_a_mixture_is_written_as_it_is(self, wide_source: Path, tmp_path: Path) -> None:
        from gguf_logits import gguf_logits
        from pair_gguf import save_gguf

        save_gguf(wide_source, tmp_path / "f16.gguf", "small")
        expected = outputs_of(wide_source)[0].numpy()
        got = gguf_logits(tmp_path / "f16.gguf", IDS)
        np.testing.assert_allclose(got, expected, atol=0.02 * expected.std())

    @pytest.mark.slow_except(1)
    @pytest.mark.parametrize("dtype", ["q4_k_m", "mxfp4", "q4_0"])
    def test_quantised_experts_add_no_noise(
        self, wide_source: Path, tmp_path: Path, dtype: str
    ) -> None:
        """The added weights multiply exact zeros: a wider model in the same types has the same
        logits."""
        narrow = altered(WIDE, hidden_size=256, n_heads=8, n_kv_heads=8)
        expected = gguf_logits_of(wide_source, tmp_path / "narrow.gguf", narrow, dtype)
        got = gguf_logits_of(wide_source, tmp_path / "wide.gguf", WIDE, dtype)
        assert np.abs(got - expected).max() < 0.15 * expected.std()
