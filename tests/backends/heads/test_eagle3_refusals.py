"""Heads that do not fit their target, or are of another kind: refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB, save_tiny_checkpoint
from eagle3_heads import (
    N_LAYERS,
    TinyHead,
    new_head,
    save_gguf_head,
    save_specforge,
    save_speculators,
)

import specdec
from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions
from backends.heads.kinds import EAGLE3, head_kind
from backends.heads.opened import open_head
from backends.heads.source import Eagle3Source
from backends.heads.target import CheckpointTarget
from backends.hf.source import HfSource
from backends.llama.source import GgufSource
from offload.errors import SpecdecError
from specdec.models.kinds import no_model
from specdec.pair import pair_path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> HfSource:
    directory = tmp_path_factory.mktemp("target")
    save_tiny_checkpoint("llama", directory, num_hidden_layers=N_LAYERS)
    return HfSource(directory, BackendOptions())


def open_for(target: HfSource, path: Path) -> HfSource:
    source = open_head(path, target, BackendOptions())
    assert isinstance(source, HfSource)
    return source


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden": ({"target_hidden_size": 64}, "hidden states of 64 numbers, and the target has 32"),
    "vocabulary": ({"vocab_size": VOCAB + 8}, "a vocabulary of 104, and the target has 96"),
    "layers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 6]}},
        r"states before the layers \[2, 6, 7\], of which the target has 1 to 6",
    ),
    "embedding": (
        {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
        r"before the layers \[0, 2, 3\]",
    ),
    "two layers": ({"num_hidden_layers": 2}, "with no layer or several"),
    "window": ({"sliding_window": 64}, "with a sliding window"),
    "eagle 1": ({"eagle_config": {"use_aux_hidden_state": False}}, "the target's last state alone"),
    "ids": (
        {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, "x", 3]},
        "must be a list of whole numbers",
    ),
    "sizes": ({"hidden_size": 1 << 40}, "hidden_size is"),
    "kinds": ({"num_attention_heads": "four"}, "num_attention_heads"),
    "shapes": ({"intermediate_size": 64}, "gate_proj"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_with_another_config_is_refused(target, tmp_path, name):
    changes, message = CONFIGS[name]
    refuse(target, save_specforge(new_head(), tmp_path / "head", **changes), message)


def refuse(target: HfSource, path: Path, message: str) -> None:
    with pytest.raises(SpecdecError, match=message) as error:
        open_for(target, path)
    assert "\n" not in str(error.value)


def without(head: TinyHead, name: str) -> TinyHead:
    tensors = {key: values for key, values in head.tensors.items() if key != name}
    return replace(head, tensors=tensors)


TENSORS: dict[str, tuple[Callable[[TinyHead], TinyHead], str]] = {
    "no head": (lambda head: without(head, "lm_head.weight"), "lacks lm_head.weight"),
    "no fc": (lambda head: without(head, "fc.weight"), "lacks 1 tensors"),
    "unknown": (
        lambda head: replace(
            head, tensors=head.tensors | {"layers.0.self_attn.q_norm.weight": torch.ones(8)}
        ),
        "1 tensors that no EAGLE-3 head of Llama's layers has",
    ),
    "ids beyond": (
        lambda head: replace(head, target_ids=head.target_ids + 1),
        "to 1 to 96, must be different ids below 96",
    ),
    "ids twice": (
        lambda head: replace(head, target_ids=head.target_ids // 2),
        "must be different ids",
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_head_with_other_tensors_is_refused(target, tmp_path, name):
    change, message = TENSORS[name]
    head = change(new_head())
    save = {"no head": save_headless}.get(name, save_specforge)
    refuse(target, save(head, tmp_path / "head"), message)


def save_headless(head: TinyHead, directory: Path) -> Path:
    """Write a head whose config still says the size of the vocabulary."""
    whole = replace(head, tensors=head.tensors | {"lm_head.weight": torch.zeros(40, 1)})
    save_specforge(whole, directory)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_gguf_head_of_another_target_is_refused(target, tmp_path):
    head = replace(new_head(), layer_inputs=(2, 6, 7))
    refuse(target, save_gguf_head(head, tmp_path / "head.gguf"), "before the layers")


def test_rope_factors_of_another_size_are_refused(target, tmp_path):
    path = save_gguf_head(new_head(), tmp_path / "head.gguf", rope_factors=torch.ones(3))
    with pytest.raises(SpecdecError, match=r"RoPE factors of the shape \(3,\), must be \(4,\)"):
        Eagle3Source(path, CheckpointTarget(target.model), BackendOptions())


def test_a_head_cut_within_its_tensors_is_refused(target, tmp_path):
    path = save_gguf_head(new_head(), tmp_path / "head.gguf")
    path.write_bytes(path.read_bytes()[:-2000])
    assert head_kind(path) is None
    with pytest.raises(SpecdecError, match="it is incomplete, download it again"):
        Eagle3Source(path, CheckpointTarget(target.model), BackendOptions())


def test_heads_are_recognised(target, tmp_path):
    folders = [
        save_specforge(new_head(), tmp_path / "a"),
        save_specforge(new_head(), tmp_path / "b", architectures=["LlamaForCausalLM"]),
        save_speculators(new_head(), tmp_path / "c"),
        save_gguf_head(new_head(), tmp_path / "d.gguf"),
    ]
    for path in folders:
        assert head_kind(path) == EAGLE3
        assert "a draft head" in str(no_model(path))
    assert head_kind(target.path) is None
    assert open_head(target.path, target, BackendOptions()) is None


@pytest.mark.parametrize("layout", ["folder", "gguf"])
def test_a_head_is_no_target(tmp_path, layout):
    head = new_head()
    if layout == "folder":
        path = save_specforge(head, tmp_path / "head")
    else:
        path = save_gguf_head(head, tmp_path / "head.gguf")
    with pytest.raises(UnsupportedModel, match="a draft head") as error:
        specdec.load(path)
    assert "\n" not in str(error.value)


def test_a_gguf_target_of_another_size_is_refused(tmp_path):
    path = save_specforge(new_head(), tmp_path / "head")
    gguf = GgufSource(pair_path("pair:target.gguf"), BackendOptions())
    with pytest.raises(UnsupportedModel, match="states of 32 numbers, and the target has 384"):
        open_head(path, gguf, BackendOptions())


def test_layers_are_inputs_or_outputs_by_the_format(target, tmp_path):
    """The same ids name outputs in SpecForge's config and inputs in speculators'."""
    head = replace(new_head(), layer_inputs=(2, 4, 5))
    places = {
        "specforge": save_specforge(head, tmp_path / "a"),
        "speculators": save_speculators(head, tmp_path / "b"),
        "gguf": save_gguf_head(head, tmp_path / "c.gguf"),
    }
    for path in places.values():
        assert open_for(target, path).target_layers == (1, 3, 4)
    config = json.loads((places["speculators"] / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (places["speculators"] / "config.json").write_text(json.dumps(config))
    assert open_for(target, places["speculators"]).target_layers == (1, 2, 2)


def test_a_copy_of_the_targets_embedding_takes_no_memory(target, tmp_path):
    embedding = target.model.model.get_input_embeddings()
    (bound,) = (b for b in target.model.non_layer_tensors if b.module is embedding)
    stored = torch.from_file(
        str(bound.record.path), size=bound.record.path.stat().st_size, dtype=torch.uint8
    )
    start, end = bound.record.offset, bound.record.offset + bound.record.n_bytes
    copy = stored[start:end].clone().view(torch.float32).view(bound.record.shape)
    head = new_head()
    plain = open_for(target, save_specforge(head, tmp_path / "a"))
    sizes = {}
    for name, own in {"copy": copy, "other": copy + 1}.items():
        tensors = head.tensors | {"embed_tokens.weight": own}
        path = save_specforge(replace(head, tensors=tensors), tmp_path / name)
        sizes[name] = open_for(target, path).non_layer_bytes
    assert sizes["copy"] == plain.non_layer_bytes
    assert sizes["other"] >= plain.non_layer_bytes + bound.record.n_bytes
