"""A transformers model without its weights, matched to the tensors of its checkpoint.

So any dense decoder of transformers runs here without model code of ours. What specdec cannot run
is refused by name, before anything is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.attention.families import adapt
from backends.attention.interface import KEYS_BY_ROW
from backends.checkpoint.config import context_limit, declared, kv_values_per_token, load_config
from backends.checkpoint.layer_count import check_layers_used, refuse_absurd_count
from backends.checkpoint.quantised import packed_tensors, quantisation_of
from backends.checkpoint.raw_config import refuse_nonsense
from backends.checkpoint.records import (
    TORCH_DTYPES,
    BoundTensor,
    check_record,
    converted_bytes,
    find_record,
    packed_by_module,
    packed_module,
    records_by_parameter,
    tied_names,
)
from backends.checkpoint.skeleton import build_skeleton, decoder_layers
from backends.contract.backend import UnsupportedModel
from backends.feedforward.elementwise import steady_activations
from backends.feedforward.linear import use_fast_products
from backends.feedforward.records import STACKED, find_experts, is_experts
from backends.feedforward.routing import steady_routing
from backends.packed.decoder import PackedModule, decode_buffer_bytes
from backends.packed.tensor import PackedTensor
from offload.formats.checkpoint import WeightIndex, main_format
from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.residency.experts import LayerExperts
from offload.residency.placement import LayerWeights

_CORRECTION = "e_score_correction_bias"
_SLIDING_MASK = "create_sliding_window_causal_mask"
"""What the code of a family with sliding windows takes from transformers."""


@dataclass(frozen=True)
class HfModel:
    """A model on the meta device and the checkpoint tensors of each of its parts."""

    model: PreTrainedModel
    config: PreTrainedConfig
    index: WeightIndex
    dtype: torch.dtype
    layers: tuple[nn.Module, ...]
    layer_tensors: tuple[tuple[BoundTensor, ...], ...]
    outer_tensors: tuple[BoundTensor, ...]
    """Embeddings, final norm and head; a tied tensor appears once for each place it serves."""
    experts: tuple[LayerExperts | None, ...] = ()
    """Of a mixture, of every layer: those that its router chooses among, which are no part of
    `layer_tensors`; empty for any other model."""
    expert_modules: tuple[nn.Module | None, ...] = ()
    """What computes them."""
    is_adapted: bool = False
    """Attention code of the family's own was replaced (backends/attention/families.py)."""

    @property
    def layer_weights(self) -> tuple[LayerWeights, ...]:
        """The layers as the planner sees them."""
        return tuple(
            LayerWeights(tuple(r for b in layer for r in b.stored)) for layer in self.layer_tensors
        )

    @property
    def outer_records(self) -> tuple[TensorRecord, ...]:
        return tuple({b.record.name: b.record for b in self.outer_tensors}.values())

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)

    @property
    def max_context(self) -> int:
        return context_limit(self.config)

    @property
    def attention(self) -> str:
        """How attention is computed, as transformers names it.

        KEYS_BY_ROW, or with whole masks "sdpa" or "eager": families with attention of their own, or
        that compute with the mask themselves.
        """
        return str(self.config._attn_implementation)

    @property
    def takes_blocks(self) -> bool:
        """Whether attention on a CPU is computed in blocks of keys, and so exactly."""
        return self.is_adapted or self.attention == KEYS_BY_ROW

    @property
    def takes_whole_cache(self) -> bool:
        """Whether attention on a CPU is given all rows of the cache as they lie. Families that make
        keys of what is cached (latent attention) are given those of the pass in order."""
        return self.takes_blocks and not declared(self.config, "kv_lora_rank")

    @property
    def converted_bytes(self) -> int:
        """Memory of tensors that cannot be used where they lie: of another dtype or misaligned.

        Those outside the layers are copied once, a layer's for the time of its forward.
        """
        layers = (converted_bytes((b.record for b in x), self.dtype) for x in self.layer_tensors)
        experts = (
            converted_bytes(expert, self.dtype) for x in self.experts if x for expert in x.tensors
        )
        outer = converted_bytes(self.outer_records, self.dtype)
        return outer + max(layers, default=0) + max(experts, default=0)

    @property
    def decode_buffer_bytes(self) -> int:
        """Memory that packed tensors are decoded into, those of a module at a time."""
        return decode_buffer_bytes(self.packed_modules)

    @property
    def packed_modules(self) -> list[PackedModule]:
        """Those that have packed tensors."""
        return [
            packed_module(tensors)
            for layer in self.layer_tensors
            for tensors in packed_by_module(layer)
        ]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return layer_window(self.model, layer)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(self._layer_kv_bytes)

    @property
    def layer_kv_bytes(self) -> int:
        """Of a token in the layer that takes most."""
        return max(self._layer_kv_bytes)

    @cached_property
    def _layer_kv_bytes(self) -> list[int]:
        itemsize = self.dtype.itemsize
        return [kv_values_per_token(self.config, layer) * itemsize for layer in self.layers]


def layer_window(model: PreTrainedModel, layer: int) -> int | None:
    """Sliding window of a layer in tokens, or None for full attention.

    A config may carry options that its family ignores: the family's code tells.
    """
    if not hasattr(sys.modules[type(model).__module__], _SLIDING_MASK):
        return None
    types = declared(model.config, "layer_types")
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(model.config, "sliding_window", None)


def load_hf_model(directory: Path) -> HfModel:
    """Build the model of `directory` on the meta device and match its tensors."""
    refuse_nonsense(directory)
    refuse_absurd_count(directory)
    config = load_config(directory)
    index = WeightIndex.from_directory(directory)
    dtype = main_dtype(index, config, directory)
    packed = packed_tensors(index, config, dtype, directory)
    model = build_skeleton(config, dtype)
    return match_checkpoint(model, index, dtype, directory, packed)


def main_dtype(
    index: Mapping[str, TensorRecord], config: PreTrainedConfig, directory: Path
) -> torch.dtype:
    """What a model computes in: most of its bytes when packed ones are decoded, or where they are
    quantised what its config says."""
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
    known = {**index, **{name: tensor.record for name, tensor in packed.items()}}
    layers_name, layers = decoder_layers(model)
    tied = tied_names(model)
    stacked = _stacked_names(model)
    records = records_by_parameter(known, model, tied, stacked)
    check_layers_used(model, layers_name, len(layers), records, directory)
    per_layer: list[list[BoundTensor]] = [[] for _ in layers]
    outer: list[BoundTensor] = []
    missing = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in stacked:
            continue
        record = find_record(records, tied.get(name, name), model.base_model_prefix)
        if record is None:
            missing.append(name)
            continue
        check_record(record, parameter.shape, name, directory)
        module_name, _, attribute = name.rpartition(".")
        module = model.get_submodule(module_name)
        bound = BoundTensor(module, attribute, record, packed.get(record.name))
        if bound.packed and bound.packed.stored and not isinstance(module, nn.Linear):
            # Others lie the other way round.
            kind = type(module).__name__
            raise UnsupportedModel(f"{directory}: {name} is quantised, and of a {kind}, no Linear")
        place = name.removeprefix(layers_name + ".") if name.startswith(layers_name + ".") else ""
        if record.scheme and not place:
            raise UnsupportedModel(
                f"{directory}: {name} is packed or quantised, which only tensors of decoder "
                "layers can be: take a checkpoint in which it is not"
            )
        (per_layer[int(place.split(".")[0])] if place else outer).append(bound)
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} tensors of {type(model).__name__}, "
            f"first {missing[0]}: the download is incomplete or the config is another model's"
        )
    _fill_buffers(model, records, directory)
    steady_activations(model)
    steady_routing(model)
    use_fast_products(model, dtype)
    modules, experts = _experts(model, layers_name, layers, records, directory)
    if any(r.scheme for x in experts if x for expert in x.tensors for r in expert):
        raise UnsupportedModel(
            f"{directory}: its experts are packed or quantised, and experts are read as they are: "
            "take the plain checkpoint"
        )
    return HfModel(
        model,
        model.config,
        index,
        dtype,
        layers,
        tuple(map(tuple, per_layer)),
        tuple(outer),
        experts,
        modules,
        is_adapted=adapt(model),
    )


def _stacked_names(model: PreTrainedModel) -> set[str]:
    """Parameters that hold all experts of a layer: a checkpoint may have a tensor for each."""
    modules = [name for name, module in model.named_modules() if is_experts(module)]
    return {f"{name}.{part}" for name in modules for part in STACKED}


def _experts(
    model: PreTrainedModel,
    layers_name: str,
    layers: tuple[nn.Module, ...],
    records: Mapping[str, TensorRecord],
    directory: Path,
) -> tuple[tuple[nn.Module | None, ...], tuple[LayerExperts | None, ...]]:
    """(what computes the experts, the experts), of every layer; two times () for no mixture."""
    modules: list[nn.Module | None] = []
    experts: list[LayerExperts | None] = []
    for index, layer in enumerate(layers):
        found = [(name, module) for name, module in layer.named_modules() if is_experts(module)]
        name, module = found[0] if found else ("", None)
        modules.append(module)
        experts.append(
            None
            if module is None
            else find_experts(
                f"{layers_name}.{index}.{name}",
                module,
                int(model.config.num_experts_per_tok),
                lambda name: find_record(records, name, model.base_model_prefix),
                lambda record, shape: check_record(record, shape, record.name, directory),
                str(directory),
            )
        )
    return (tuple(modules), tuple(experts)) if any(experts) else ((), ())


def _fill_buffers(
    model: PreTrainedModel, records: Mapping[str, TensorRecord], directory: Path
) -> None:
    """Read what checkpoints hold beside weights: a few numbers that correct the scores of a router
    (DeepSeek-V3), in float32."""
    for name, module in model.named_modules():
        buffer = module._buffers.get(_CORRECTION)
        if buffer is None:
            continue
        record = find_record(records, f"{name}.{_CORRECTION}", model.base_model_prefix)
        if record is None or record.scheme:
            raise CheckpointError(
                f"{directory} lacks {name}.{_CORRECTION}: the download is incomplete or the "
                "config is another model's"
            )
        check_record(record, buffer.shape, record.name, directory)
        stored = bytearray(read_part(record.path, record.offset, record.n_bytes))
        values = torch.frombuffer(stored, dtype=torch.uint8)
        module._buffers[_CORRECTION] = values.view(TORCH_DTYPES[record.dtype]).float()
