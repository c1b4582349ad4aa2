"""HfModel: a transformers model without its weights, matched to the tensors of its checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.attention.interface import KEYS_BY_ROW
from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.checkpoint.architecture import language_config
from backends.checkpoint.config import (
    HeadShape,
    KvHeads,
    context_limit,
    declared,
    head_shape,
    is_attention,
    kv_heads,
)
from backends.checkpoint.records import (
    BoundTensor,
    bound_copies,
    converted_bytes,
    packed_by_module,
    packed_module,
)
from backends.hf.expert_records import ExpertMatrices
from backends.packed.decoder import PackedModule, decode_buffer_bytes
from backends.recurrent.shapes import PlaceShape
from backends.recurrent.states import Place
from offload.formats.tensors import TensorIndex, TensorRecord
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
