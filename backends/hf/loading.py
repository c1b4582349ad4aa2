"""Matching of a checkpoint to a transformers model that is built without weights.

Any dense decoder of transformers runs without model code of ours. A model that specdec cannot run
is refused with a reason before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.attention.families import adapt
from backends.checkpoint.architecture import language_config
from backends.checkpoint.buffers import fill_buffers
from backends.checkpoint.config import config_faults, load_config
from backends.checkpoint.kinds import refuse_score_head
from backends.checkpoint.layer_count import check_layers_used
from backends.checkpoint.matching import TensorMatch, match_tensors
from backends.checkpoint.quantised import packed_tensors, quantisation_of
from backends.checkpoint.records import TORCH_DTYPES, BoundTensor, check_record, joined
from backends.checkpoint.skeleton import build_skeleton, decoder_layers, kept_in_float32
from backends.contract.backend import UnsupportedModel
from backends.feedforward.elementwise import batch_invariant_functions
from backends.feedforward.linear import use_fast_products
from backends.feedforward.records import expert_modules, stacked_parts
from backends.hf.expert_records import experts_by_layer
from backends.hf.model import HfModel
from backends.packed.tensor import PackedTensor
from backends.recurrent.shapes import recurrences_of
from offload.formats.checkpoint import WeightIndex, main_format
from offload.formats.tensors import CheckpointError, TensorIndex, TensorRecord


def load_hf_model(directory: Path) -> HfModel:
    """Build the model of `directory` on the meta device and match its tensors."""
    config = load_config(directory)
    index = WeightIndex.from_directory(directory)
    refuse_score_head(directory, index)
    with config_faults(directory):
        dtype = main_dtype(index, config, directory)
        packed = packed_tensors(index, config, dtype, directory)
        model = build_skeleton(config, dtype)
        return match_checkpoint(model, index, dtype, directory, packed)


def main_dtype(
    index: Mapping[str, TensorRecord], config: PreTrainedConfig, directory: Path
) -> torch.dtype:
    """Return the dtype a model computes in: the one of most of its (decoded) bytes, or the config's
    dtype for a quantised model."""
    if quantisation_of(config) is not None:
        return config.dtype if config.dtype in TORCH_DTYPES.values() else torch.bfloat16
    name = main_format(index)
    if name not in TORCH_DTYPES:
        lost = ", or a packed file that lost its metadata" if name == "U8" else ""
        raise UnsupportedModel(
            f"{directory} holds {name} weights{lost}: bf16, fp16 and fp32 can run"
        )
    return TORCH_DTYPES[name]


def match_checkpoint(
    model: PreTrainedModel,
    index: WeightIndex,
    dtype: torch.dtype,
    directory: Path,
    packed: Mapping[str, PackedTensor],
) -> HfModel:
    """Find the checkpoint tensor of every parameter, or say which are missing or misshapen."""
    match = match_tensors(model, index, packed, directory)
    return bind_checkpoint(model, index, dtype, directory, packed, match)


def bind_checkpoint(
    model: PreTrainedModel,
    index: TensorIndex,
    dtype: torch.dtype,
    directory: Path,
    packed: Mapping[str, PackedTensor],
    match: TensorMatch,
) -> HfModel:
    """Return the model with its matched tensors, or say which are missing or misshapen."""
    layers_name, layers = decoder_layers(model)
    check_layers_used(model, layers_name, len(layers), match.named, directory)
    stacked = {
        f"{name}.{part}" for name, module in expert_modules(model) for part in stacked_parts(module)
    }
    in_float32 = kept_in_float32(model, dtype)
    per_layer: list[list[BoundTensor]] = [[] for _ in layers]
    non_layer: list[BoundTensor] = []
    missing = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stacked:
            continue
        parts = match.merged.get(name, ())
        record = parts[0] if parts else match.find(name)
        if record is None:
            missing.append(name)
            continue
        record = joined(record, parts)
        check_record(record, parameter.shape, name, directory)
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        is_float32 = in_float32 is not None and in_float32.search(name) is not None
        bound = BoundTensor(module, attribute, record, packed.get(record.name), is_float32, parts)
        if bound.packed and bound.packed.stored and not isinstance(module, nn.Linear):
            # The weights of other modules (Conv1D) are transposed.
            kind = type(module).__name__
            raise UnsupportedModel(f"{directory}: {name} is quantised, and of a {kind}, no Linear")
        place = name.removeprefix(layers_name + ".") if name.startswith(layers_name + ".") else ""
        if record.scheme and not place:
            raise UnsupportedModel(
                f"{directory}: {name} is packed or quantised, which only tensors of decoder "
                "layers can be: take a checkpoint in which it is not"
            )
        (per_layer[int(place.split(".")[0])] if place else non_layer).append(bound)
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} tensors of {type(model).__name__}, "
            f"first {missing[0]}: the download is incomplete or the config is another model's"
        )
    fill_buffers(model, match, directory)
    batch_invariant_functions(model)
    use_fast_products(model, dtype)
    modules, experts, matrices = experts_by_layer(
        model, layers_name, layers, match, packed, directory
    )
    return HfModel(
        model,
        language_config(model.config),
        index,
        dtype,
        layers,
        tuple(map(tuple, per_layer)),
        tuple(non_layer),
        experts,
        matrices,
        modules,
        weight_warnings=match.warnings,
        recurrences=recurrences_of(model, layers),
        is_adapted=adapt(model),
    )
