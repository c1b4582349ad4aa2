"""A transformers model without its weights, matched to the tensors of its checkpoint.

Any dense decoder of transformers runs without model code of ours. A model that specdec cannot run
is refused with a reason before anything is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.attention.families import adapt
from backends.attention.interface import KEYS_BY_ROW
from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.checkpoint.architecture import language_config
from backends.checkpoint.buffers import fill_buffers
from backends.checkpoint.config import (
    HeadShape,
    KvHeads,
    config_faults,
    context_limit,
    declared,
    head_shape,
    is_attention,
    kv_heads,
    load_config,
)
from backends.checkpoint.kinds import refuse_score_head
from backends.checkpoint.layer_count import check_layers_used
from backends.checkpoint.matching import TensorMatch, match_tensors
from backends.checkpoint.quantised import packed_tensors, quantisation_of
from backends.checkpoint.records import (
    TORCH_DTYPES,
    BoundTensor,
    bound_copies,
    check_record,
    converted_bytes,
    joined,
    packed_by_module,
    packed_module,
)
from backends.checkpoint.skeleton import build_skeleton, decoder_layers, kept_in_float32
from backends.contract.backend import UnsupportedModel
from backends.feedforward.elementwise import batch_invariant_functions
from backends.feedforward.linear import use_fast_products
from backends.feedforward.records import expert_modules, stacked_parts
from backends.hf.expert_records import ExpertMatrices, experts_by_layer
from backends.packed.decoder import PackedModule, decode_buffer_bytes
from backends.packed.tensor import PackedTensor
from backends.recurrent.shapes import PlaceShape, recurrences_of
from backends.recurrent.states import Place
from offload.formats.checkpoint import WeightIndex, main_format
from offload.formats.tensors import CheckpointError, TensorIndex, TensorRecord
from offload.placement.experts import LayerExperts
from offload.placement.placement import LayerWeights

_COMPUTED_WITH = ("kv_lora_rank", "keep_window_size", "lambda_std_dev")
"""Options of the families whose code computes with cached keys or values."""
_SLIDING_MASK = "create_sliding_window_causal_mask"
"""Function that the modules of families with sliding windows import from transformers."""


@dataclass(frozen=True)
class HfModel:
    """A model on the meta device and the checkpoint tensors of each of its parts."""

    model: PreTrainedModel
    config: PreTrainedConfig
    """The language model's part of `model.config`."""
    index: TensorIndex
    dtype: torch.dtype
    layers: tuple[nn.Module, ...]
    layer_tensors: tuple[tuple[BoundTensor, ...], ...]
    non_layer_tensors: tuple[BoundTensor, ...]
    """Embeddings, final norm and head; a tied tensor appears once for each place it serves."""
    experts: tuple[LayerExperts | None, ...] = ()
    """Routed experts of each layer of a mixture, which are not in `layer_tensors`; empty for a
    dense model."""
    expert_matrices: tuple[ExpertMatrices | None, ...] = ()
    """Matrices of each layer's experts, which `experts` has the stored tensors of."""
    expert_modules: tuple[nn.Module | None, ...] = ()
    """Module of each layer that computes its experts."""
    weight_warnings: tuple[str, ...] = ()
    """Warnings about weights that differ from what the config says."""
    recurrences: Mapping[Place, PlaceShape] = field(default_factory=dict)
    """Recurrences of the layers that have a recurrent state."""
    is_adapted: bool = False
    """Whether the family's own attention code was replaced (backends/attention/families.py)."""
    kv_formats: KvFormats = OWN_FORMATS
    """Number formats of the KV cache."""

    @property
    def layer_weights(self) -> tuple[LayerWeights, ...]:
        """The layers as the planner sees them."""
        return tuple(
            LayerWeights(tuple(r for b in layer for r in b.stored)) for layer in self.layer_tensors
        )

    @property
    def non_layer_records(self) -> tuple[TensorRecord, ...]:
        return tuple({b.record.name: b.record for b in self.non_layer_tensors}.values())

    @property
    def vocab_size(self) -> int:
        head = self.model.get_output_embeddings()
        of_draft_head = getattr(head, "vocab_size", None)  # may have fewer outputs
        return int(of_draft_head or head.weight.shape[0])  # tied: those of the tokens

    @property
    def max_context(self) -> int:
        return context_limit(self.config)

    @property
    def attention(self) -> str:
        """transformers' name of the attention implementation.

        KEYS_BY_ROW, or with whole masks "sdpa" or "eager": for families that have attention code of
        their own or compute with the mask.
        """
        return str(self.config._attn_implementation)

    @property
    def takes_blocks(self) -> bool:
        """Whether attention on a CPU is computed in blocks of keys, and so is exact."""
        return self.is_adapted or self.attention == KEYS_BY_ROW

    @property
    def takes_whole_cache(self) -> bool:
        """Whether attention on a CPU is given the whole cache. Families that compute with what is
        cached (latent attention, Doge, DiffLlama) are given the keys of the pass in order
        instead."""
        computes = any(declared(self.config, name) for name in _COMPUTED_WITH)
        return self.takes_blocks and not computes

    @property
    def converted_bytes(self) -> int:
        """Memory for copies of tensors that have another dtype or are misaligned.

        Non-layer tensors are copied once, a layer's tensors for the time of its forward.
        """
        layers = (bound_copies(x, self.dtype) for x in self.layer_tensors)
        experts = (
            converted_bytes((x.record for x in expert if x.packed is None), self.dtype)
            for own in self.expert_matrices
            if own
            for expert in own
        )
        non_layer = bound_copies(self.non_layer_tensors, self.dtype)
        return non_layer + max(layers, default=0) + max(experts, default=0)

    def decode_buffer_bytes(self, n_threads: int) -> int:
        """Return the memory that computing with packed tensors takes, one module at a time."""
        return decode_buffer_bytes(self.packed_modules, n_threads)

    @property
    def packed_modules(self) -> list[PackedModule]:
        """Modules that have packed tensors; of the experts of a layer, the first."""
        dense = [
            packed_module(tensors)
            for layer in self.layer_tensors
            for tensors in packed_by_module(layer)
        ]
        firsts = (matrix.packed for own in self.expert_matrices if own for matrix in own[0])
        experts = (PackedModule((x,), is_multiplied=True) for x in firsts if x is not None)
        return [*dense, *experts]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return layer_window(self.model, layer)

    def looks_ahead(self, layer: int) -> bool:
        """Whether the nodes that a pass adds to a sequence see one another in both directions."""
        return False

    @cached_property
    def head_shapes(self) -> tuple[HeadShape, ...]:
        """Distinct heads of the layers that attend."""
        layers = (layer for i, layer in enumerate(self.layers) if self.has_attention(i))
        return tuple(dict.fromkeys(head_shape(self.config, layer) for layer in layers))

    def has_attention(self, layer: int) -> bool:
        return any(map(is_attention, self.layers[layer].modules()))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token in the KV cache."""
        return sum(map(sum, self.stored_kv_bytes))

    @property
    def layer_kv_bytes(self) -> int:
        """Bytes of one token's keys and values as they are computed with, in the layer that needs
        the most."""
        return max(self.layer_kv_values) * self.dtype.itemsize

    @property
    def layer_kv_values(self) -> list[int]:
        """Numbers of one token in each layer's keys and values."""
        return [keys.n_values + values.n_values for keys, values in self.layer_kv_heads]

    @cached_property
    def layer_kv_heads(self) -> list[tuple[KvHeads, KvHeads]]:
        """Heads of the keys and of the values that each layer caches."""
        return [kv_heads(self.config, layer) for layer in self.layers]

    @property
    def stored_kv_bytes(self) -> list[tuple[int, int]]:
        """Bytes of one token's keys and of its values in the KV cache, for each layer."""
        return [self.kv_formats.token_bytes(x, self.dtype) for x in self.layer_kv_heads]

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence after one of its tokens."""
        return sum(item.state.n_bytes for item in self.recurrences.values())

    @cached_property
    def largest_state_bytes(self) -> int:
        """Bytes of the largest of these states."""
        return max((item.state.n_bytes for item in self.recurrences.values()), default=0)

    @cached_property
    def fed_bytes_per_token(self) -> int:
        """Bytes that recurrent layers keep of a token until it is certain."""
        return sum(spec.n_bytes for item in self.recurrences.values() for spec in item.fed)


def layer_window(model: PreTrainedModel, layer: int) -> int | None:
    """Sliding window of a layer in tokens, or None for full attention.

    Decided by the family's code, since a config may carry options that the family ignores.
    """
    if not hasattr(sys.modules[type(model.get_decoder()).__module__], _SLIDING_MASK):
        return None
    config = language_config(model.config)
    types = declared(config, "layer_types")
    if types is not None and types[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


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
