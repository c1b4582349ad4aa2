"""A drawn gpt-oss loads as the published one, and computes the same in transformers and here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from alone import own
from checkpoints import save_tiny_checkpoint
from family_checks import TOLERANCE, scale
from grown_models import SMALL, altered, save_source

from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from bench.published.gpt_oss import draw_gpt_oss, model_bytes, shape_of_bytes
from bench.synth.shapes import MIXTURES, Experts, LlamaShape, SynthError
from offload.formats.checkpoint import WeightIndex
from offload.placement.experts import ExpertCachePlan, count_experts

TINY = LlamaShape(64, 64, 4, 8, 4, 16, 300, tied=False, experts=Experts(6, 2, 96))
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38, 64, 71]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture
def drawn(tokenizer: Path, tmp_path: Path) -> Path:
    """In several files."""
    report = draw_gpt_oss(tokenizer, tmp_path / "drawn", TINY, shard_bytes=100_000)
    assert report.n_files > 1
    written = sum(path.stat().st_size for path in report.path.glob("*.safetensors"))
    assert 0 < written - report.n_bytes < 40_000
    return report.path


def test_names_and_shapes_are_those_that_transformers_saves(drawn: Path, tmp_path: Path) -> None:
    save_tiny_checkpoint("gpt-oss", tmp_path / "saved", hidden_size=64, intermediate_size=96)
    saved = WeightIndex.from_directory(tmp_path / "saved")
    expected = {name for name in saved if ".layers." not in name or ".0." in name}
    names = set(json.loads((drawn / "model.safetensors.index.json").read_text())["weight_map"])
    parts = {name for name in names if name.endswith(("_blocks", "_scales"))}
    of_parts = {name.rpartition("_")[0] for name in parts}
    actual = {name for name in names - parts | of_parts if ".layers." not in name or ".0." in name}
    assert actual == expected


def test_logits_are_those_of_transformers_on_dequantised_weights(drawn: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    settings = Mxfp4Config(dequantize=True)
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        drawn, quantization_config=settings, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    experts = theirs.model.layers[0].mlp.experts.down_proj.detach().float()
    assert experts.std().item() == pytest.approx(0.02, rel=0.1)
    with torch.no_grad():
        expected = theirs.float()(torch.tensor([PROMPT])).logits[0, -1].numpy()
    config = json.loads((drawn / "config.json").read_text())
    (drawn / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    model = load_hf_model(drawn)
    plan = ExpertCachePlan(model.experts, count_experts(model.experts))
    with TorchBackend(model, CpuWeights(model, model.layer_weights, 2, experts=plan)) as backend:
        actual = own(backend).prefill(PROMPT)
    assert expected.std() > 0.01
    assert np.abs(actual - expected).max() <= TOLERANCE * scale(expected)
    assert not actual[SMALL.vocab_size :].any()  # ids without a token


def test_the_bytes_of_gpt_oss_20b_are_the_published_ones() -> None:
    shape = MIXTURES["gpt-oss-20b"]
    assert model_bytes(shape) == 13_761_264_768
    assert shape_of_bytes(shape, 8_000_000_000, None).n_layers == 12
    with pytest.raises(SynthError, match="whole layers, from"):
        shape_of_bytes(shape, 1_000_000_000, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "routed experts"),
        ({"vocab_size": 50}, "96 tokens"),
        ({"hidden_size": 80}, "rows of 80"),
    ],
)
def test_unsuitable_shapes_are_refused(
    tokenizer: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(SynthError, match=message):
        draw_gpt_oss(tokenizer, tmp_path / "drawn", altered(TINY, **changes))
    assert not list(tmp_path.iterdir())
