"""Folders without a causal language model: refused by name, from their files alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_tiny_checkpoint
from transformers.models.auto import modeling_auto

from backends.checkpoint.config import load_config
from backends.checkpoint.kinds import other_kind, refuse_score_head
from backends.contract.backend import UnsupportedModel
from backends.hf.loading import load_hf_model
from backends.shapes.hf import hf_shape
from offload.errors import SpecdecError

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}
MEAN = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
SCORE = [MEAN[0], {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"}]

REST: list[tuple[dict[str, Any], str]] = [
    ({"modules.json": MEAN}, "an embedding model .sentence-transformers' modules.json"),
    ({"modules.json": SCORE}, "a reranker"),
    ({"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}}, "an embedding model"),
    ({"2_Pooling/config.json": {}}, "an embedding model .sentence-transformers' Pooling"),
    ({"config_sentence_transformers.json": {"prompts": {}}}, "an embedding model"),
    ({"config.json": {"architectures": ["LlamaModel"]}}, "without a head .* .LlamaModel"),
    ({"config.json": {"architectures": "Qwen3Model"}}, "without a head .* .Qwen3Model"),
    ({"config.json": {"architectures": ["Qwen2ForSequenceClassification"]}}, "a classifier"),
    ({"config.json": {"architectures": ["LlamaForTokenClassification"]}}, "a classifier"),
    ({"config.json": {"architectures": ["LlamaForQuestionAnswering"]}}, "extracting answers"),
    ({"config.json": {"architectures": ["Qwen2ForRewardModel"]}}, "a reward model"),
    ({"config.json": {"architectures": ["BertForMaskedLM"]}}, "a masked language model"),
    ({"config.json": {"architectures": ["LlamaForCausalLMEagle3"]}}, "a draft head"),
    ({"config.json": {"architectures": ["EagleLlamaForCausalLM"]}}, "a draft head"),
    ({"config.json": {"speculators_model_type": "eagle3"}}, "a draft head"),
    ({"config.json": {"model_type": "gemma4_assistant"}}, "a draft head"),
    ({"config.json": {"use_bidirectional_attention": True}}, "attention looks ahead"),
    ({"config.json": {"use_bidirectional_attention": "all"}}, "attention looks ahead"),
    ({"config.json": {"text_config": {"use_bidirectional_attention": True}}}, "looks ahead"),
    ({"config.json": {"architectures": ["BidirectionalMistralForCausalLM"]}}, "looks ahead"),
    ({"config.json": {"architectures": ["LlamaBiForMNTP"]}}, "looks ahead"),
    ({"config.json": {"is_causal": False}}, "attention looks ahead .is_causal"),
    ({"config.json": {"model_type": "bert"}}, "an encoder"),
    ({"config.json": {"model_type": "modernbert"}}, "an encoder"),
    ({"config.json": {"model_type": "t5", "is_encoder_decoder": True}}, "an encoder-decoder"),
    ({"model_index.json": {"_class_name": "FluxPipeline"}}, "a diffusers pipeline .FluxPipeline"),
    (
        {"config.json": {"model_type": None, "_diffusers_version": "0", "_class_name": "UNet"}},
        "a part of a diffusers pipeline .UNet",
    ),
    ({"adapter_config.json": {"base_model_name_or_path": "me/base"}}, "an adapter .* of me/base"),
]
"""(files beside a llama's config.json, into which keys are merged; what the folder is)"""

MODELS: list[dict[str, Any]] = [
    {},
    {"modules.json": []},
    {"config.json": {"architectures": None}},
    {"config.json": {"architectures": ["LLaMAForCausalLM"]}},
    {"config.json": {"architectures": ["OwnForCausalLM"]}},
    {"config.json": {"use_bidirectional_attention": "vision"}},
    {"config.json": {"use_bidirectional_attention": False, "is_causal": True}},
]


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in {"config.json": {}, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**LLAMA, **content} if name == "config.json" else content))
    return folder


@pytest.mark.parametrize(("files", "kind"), REST, ids=[str(files)[:50] for files, _ in REST])
def test_what_is_no_language_model_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], kind: str
) -> None:
    folder = write(tmp_path, files)
    for read in (load_config, load_hf_model, hf_shape):
        with pytest.raises(UnsupportedModel, match=kind) as caught:
            read(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("files", MODELS, ids=str)
def test_language_models_are_none_of_these(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = write(tmp_path, files)
    assert other_kind(folder) is None
    assert load_config(folder).model_type == "llama"


def names_of(mapping: str) -> set[str]:
    values = getattr(modeling_auto, mapping).values()
    return {
        name for value in values for name in ([value] if isinstance(value, str) else value) if name
    }


def test_every_causal_class_of_transformers_is_known_and_no_other_kind(tmp_path: Path) -> None:
    causal = names_of("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES") - {"BertGenerationDecoder"}
    causal = {name for name in causal if "Assistant" not in name}
    assert len(causal) > 100
    tasks = "SEQUENCE_CLASSIFICATION TOKEN_CLASSIFICATION QUESTION_ANSWERING MULTIPLE_CHOICE"
    rest = {n for task in tasks.split() for n in names_of(f"MODEL_FOR_{task}_MAPPING_NAMES")}
    rest |= {name for name in names_of("MODEL_MAPPING_NAMES") if name.endswith("Model")}
    assert len(rest - causal) > 400
    for names, is_model in ((causal, True), (rest - causal, False)):
        wrong = []
        for name in sorted(names):
            (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
            if (other_kind(tmp_path) is None) is not is_model:
                wrong.append(name)
        assert wrong == []


@pytest.mark.parametrize(
    "name", ["score.weight", "classifier.weight", "classifier.out_proj.weight", "qa_outputs.bias"]
)
def test_a_head_of_scores_is_recognised_by_the_weights(tmp_path: Path, name: str) -> None:
    """The file config.json does not name the class; a tied model would have run."""
    with pytest.raises(UnsupportedModel, match=f"ends in {name}"):
        refuse_score_head(tmp_path, ["model.norm.weight", name])
    refuse_score_head(tmp_path, ["model.norm.weight", "lm_head.weight", name])
    refuse_score_head(tmp_path, ["model.norm.weight", "model.layers.0.classifier_free.weight"])


def test_a_classifier_that_does_not_say_so_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = save_tiny_checkpoint("llama-tied", tmp_path / "model")
    first = sorted(folder.glob("model-00001*.safetensors"))[0]
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["score.weight"] = first.name
    index.write_text(json.dumps(listed))
    save_file({**load_file(first), "score.weight": torch.zeros(2, 32)}, first)
    for read in (load_hf_model, hf_shape):
        with pytest.raises(UnsupportedModel, match=r"ends in score\.weight"):
            read(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n".format(
    "0" * 64
)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_git_lfs_pointer_is_reported_by_kind(tmp_path: Path, name: str) -> None:
    write(tmp_path, {})
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(SpecdecError, match=rf"{name} is a Git LFS pointer .* `git lfs pull`"):
        load_hf_model(tmp_path)


def test_large_files_are_not_read_for_pointers(tmp_path: Path) -> None:
    """The specification limits a pointer file to 1024 bytes."""
    write(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(2000))
    with pytest.raises(SpecdecError, match="its header describes 10"):
        load_hf_model(tmp_path)
