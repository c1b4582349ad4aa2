"""A tied head: the bytes read, the memory planned, and the message to the user."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from alone import own
from disagreements import Disagreement, Writer
from family_checks import PROMPT, TOLERANCE, reference_logits, scale
from packed_models import logits, save_packable
from quantised_models import fp8, save_quantised
from safetensors.torch import load_file, save_file

from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions
from backends.cuda.source import HfGpuSource
from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from backends.hf.source import HfSource
from backends.shapes.hf import hf_shape
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError
from specdec.packing.pack import pack

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def llama() -> Writer:
    return Writer("llama")


def non_layer_names(model: HfModel) -> set[str]:
    return {r.name for r in model.non_layer_records}


@pytest.mark.parametrize(
    ("odd", "pinned"),
    [
        (Disagreement(head="own"), {HEAD, EMBEDDING}),
        (Disagreement(head="same"), {EMBEDDING}),
        (Disagreement(head="none"), {EMBEDDING}),
        (Disagreement(has_embedding=False), {HEAD}),
        (Disagreement(head="same", is_tied=False), {HEAD, EMBEDDING}),
    ],
)
def test_tensors_are_planned_for_once_each_that_is_used(
    odd: Disagreement, pinned: set[str], llama: Writer, tmp_path: Path
) -> None:
    directory = llama.write(tmp_path / "model", odd)
    source = HfSource(directory, BackendOptions())
    assert non_layer_names(source.model) - {"model.norm.weight"} == pinned
    index = WeightIndex.from_directory(directory)
    n_bytes = sum(index[name].n_bytes for name in (*pinned, "model.norm.weight"))
    assert hf_shape(directory).non_layer_bytes == n_bytes
    assert sum(r.n_bytes for r in source.model.non_layer_records) == n_bytes
    is_reported = odd.is_tied and pinned == {HEAD, EMBEDDING}
    for item in (source, HfGpuSource(source)):
        messages = [line for line in item.warnings if HEAD in line]
        assert len(messages) == is_reported
        assert all(EMBEDDING in line and "tie_word_embeddings" in line for line in messages)


def test_a_lost_tensor_is_named(llama: Writer, tmp_path: Path) -> None:
    odd = Disagreement(is_tied=False, head="none")
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors of LlamaForC.* first {HEAD}:"):
        load_hf_model(llama.write(tmp_path / "untied", odd))
    odd = Disagreement(head="none", has_embedding=False)
    with pytest.raises(CheckpointError, match=f"first {EMBEDDING}:"):
        load_hf_model(llama.write(tmp_path / "tied", odd))


def test_a_packed_copy_disagrees_as_its_source_does(tmp_path: Path) -> None:
    """Packing renumbers the files; of a tensor in two of them the last one still counts."""
    plain = save_packable("llama", tmp_path / "plain", tie_word_embeddings=True)
    shards = sorted(plain.glob("*.safetensors"))
    norm = "model.layers.0.input_layernorm.weight"
    all_tensors = {name: t for path in shards for name, t in load_file(path).items()}
    assert norm not in load_file(shards[0])
    for path, name, like in ((shards[0], norm, norm), (shards[-1], HEAD, EMBEDDING)):
        more = {name: torch.rand_like(all_tensors[like])}
        save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    pack(plain, tmp_path / "packed")
    model = load_hf_model(tmp_path / "packed")
    assert non_layer_names(model) >= {HEAD, EMBEDDING}
    expected = logits(plain, is_streamed=False)
    for item, other in zip(logits(tmp_path / "packed", False), expected, strict=True):
        np.testing.assert_array_equal(item, other)


def test_the_head_of_a_quantised_model_is_its_own(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    both = save_quantised(tmp_path, fp8(), settings, torch.bfloat16)
    for directory in both:
        (path,) = directory.glob("*.safetensors")
        config = directory / "config.json"
        config.write_text(config.read_text().replace(
            '"tie_word_embeddings": false', '"tie_word_embeddings": true'
        ))  # fmt: skip
        assert HEAD in load_file(path)
    quantised, plain = both
    assert non_layer_names(load_hf_model(quantised)) >= {HEAD, EMBEDDING}
    for item, other in zip(logits(quantised, False), logits(plain, False), strict=True):
        np.testing.assert_array_equal(item, other)
    (path,) = quantised.glob("*.safetensors")
    tensors = load_file(path)
    parts, _ = fp8()(tensors[HEAD])
    tensors |= {f"lm_head.{name}": part for name, part in parts.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"{HEAD} is packed or quantised"):
        load_hf_model(quantised)


# --- experts ----------------------------------------------------------------------------------


def respell(source: Path, folder: Path, spell: Callable[[str], list[str]]) -> Path:
    """Copy the checkpoint into one file, with tensors renamed by `spell`."""
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors |= dict.fromkeys(spell(name), tensor)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def assert_as_transformers(directory: Path) -> np.ndarray:
    expected = reference_logits(directory, PROMPT)[-1]
    model = load_hf_model(directory)
    with TorchBackend(model, CpuWeights(model, model.layer_weights, 2)) as backend:
        actual = own(backend).prefill(PROMPT)
    assert np.abs(actual - expected).max() <= TOLERANCE * scale(expected)
    return expected


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss"])
def test_experts_are_found_without_the_prefix_and_with_two(
    family: str, checkpoint_factory, tmp_path: Path
) -> None:
    source = checkpoint_factory(family)
    expected = reference_logits(source, PROMPT)[-1]
    bare = respell(source, tmp_path / "bare", lambda name: [name.removeprefix("model.")])
    twice = respell(source, tmp_path / "twice", lambda name: [f"model.{name}"])
    for directory in (bare, twice):
        theirs = assert_as_transformers(directory)
        assert np.abs(theirs - expected).max() <= TOLERANCE * scale(expected)


def test_experts_under_two_names_are_refused(checkpoint_factory, tmp_path: Path) -> None:
    """Transformers would merge all of them and refuse the shape."""
    source = checkpoint_factory("qwen3-moe")

    def spell(name: str) -> list[str]:
        return [name, name.removeprefix("model.")] if ".experts.0.up" in name else [name]

    directory = respell(source, tmp_path / "model", spell)
    with pytest.raises(RuntimeError):
        reference_logits(directory, PROMPT)
    with pytest.raises(CheckpointError, match="are both model.layers.0.mlp.experts.0.up_proj"):
        load_hf_model(directory)


def test_one_tensor_for_all_experts_beside_one_for_each(checkpoint_factory, tmp_path: Path) -> None:
    """Transformers drops the first tensor of gate and up, and fails on the other."""
    directory = respell(checkpoint_factory("qwen3-moe"), tmp_path / "model", lambda name: [name])
    path = directory / "model.safetensors"
    for name, shape in (("gate_up_proj", (12, 48, 32)), ("down_proj", (12, 32, 24))):
        if name == "down_proj":
            assert_as_transformers(directory)
        more = {f"model.layers.0.mlp.experts.{name}": torch.rand(shape)}
        save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    with pytest.raises(AttributeError):
        reference_logits(directory, PROMPT)
    with pytest.raises(CheckpointError, match="down_proj as one tensor for all experts and as one"):
        load_hf_model(directory)
