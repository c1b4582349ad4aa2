"""A GGUF model as its header describes it: layers, sizes, and KV cache bytes per token.

llama.cpp is not loaded here. Architectures that specdec cannot run are refused; any other is left
to llama.cpp, which reports those that it does not know.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from backends.contract.backend import UnsupportedModel
from backends.gguf.experts import EXPERT_TENSOR, check_graph, count_experts, slice_of
from backends.gguf.formats import check_formats
from backends.gguf.hparams import (
    MAX_CONTEXT,
    MAX_HIDDEN_SIZE,
    MAX_LAYERS,
    Keys,
    KvShape,
    check_epsilons,
    read_kv_shape,
)
from backends.gguf.kinds import LOOPED, refuse_other_kinds
from backends.gguf.vocabulary import check_vocabulary
from offload.formats.gguf_index import GgufError, GgufIndex
from offload.formats.tensors import TensorRecord
from offload.placement.experts import LayerExperts
from offload.placement.placement import LayerWeights

# llama.cpp's llm_arch_is_recurrent and llm_arch_is_hybrid; newer ones are found by their tensors.
_RECURRENT = frozenset("mamba mamba2 rwkv6 rwkv6qwen2 rwkv7 arwkv7".split())
_HYBRID = frozenset(
    "jamba falcon-h1 plamo2 granitehybrid lfm2 lfm2moe nemotron_h nemotron_h_moe qwen3next "
    "kimi-linear qwen35 qwen35moe deepseek4 qwen4exp kimi-k3 bailingmoe3 glm5-next "
    "minimax-01".split()
)
_RECURRENT_KEYS = ("ssm.", "wkv.", "shortconv.", "kda.", "attention.recurrent_layers")
_CONVOLUTION_TENSOR = re.compile(r"\.(ssm_conv1d\w*|shortconv\.conv)\.weight$")
_GATE_TENSOR, _MAMBA_TENSOR = ".ssm_dt.bias", ".ssm_d"
_RECURRENT_TENSOR = re.compile(r"blk\.\d+\.(ssm_|shortconv\.|time_mix_)")
_KEY_TENSOR = re.compile(r"blk\.\d+\.attn_(k|v|kv|kv_[ab](_mqa)?|k_b|v_b)\.")
_LAYER_TENSOR = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")
_ARCHITECTURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, eq=False)
class GgufModel:
    """One model on disk, unloaded."""

    path: Path
    """The file that llama.cpp loads: the first of a split model."""
    index: GgufIndex
    architecture: str
    n_layers: int
    """Layers that a pass runs, without those for multi-token prediction."""
    vocab_size: int
    """Rows of the embedding, and columns of the logits."""
    max_context: int
    """Context length that the model was trained for."""
    hidden_size: int
    layers: tuple[LayerWeights, ...]
    non_layer_records: tuple[TensorRecord, ...]
    """Embeddings, final norm, head, rope factors: all tensors that belong to no layer."""
    mtp_records: tuple[TensorRecord, ...]
    """Tensors of multi-token-prediction layers, which only a draft head runs (heads.py); without
    one they need no memory."""
    is_tied: bool
    """Whether the embedding is also the head."""
    n_experts: int
    """Experts of a layer; 0 for a dense model."""
    n_experts_used: int
    """Experts that a token uses; 0 for a dense model, or if the file does not say."""
    is_recurrent: bool
    """Whether layers have a state that cannot be rolled back (Mamba, RWKV, hybrids)."""
    sliding_window: int | None
    """Window in tokens, as stored; the architecture decides which layers use it, if any."""
    kv_shape: KvShape

    @cached_property
    def resident_non_layer_records(self) -> tuple[TensorRecord, ...]:
        """Non-layer tensors that a streamed model keeps in memory: all but an embedding that is not
        the head, of which a pass reads the few rows that it uses."""
        records = self.non_layer_records
        return tuple(r for r in records if self.is_tied or r.name != _EMBEDDING)

    @cached_property
    def experts(self) -> tuple[LayerExperts | None, ...]:
        """Experts of each layer that a pass may read one by one; () for a dense model."""
        experts = tuple(map(self.experts_of, self.layers))
        return experts if any(experts) else ()

    @cached_property
    def layers_without_experts(self) -> tuple[LayerWeights, ...]:
        """Tensors of the layers that every pass reads."""
        return tuple(
            LayerWeights(tuple(r for r in layer.tensors if not self._is_of_experts(r)))
            for layer in self.layers
        )

    def experts_of(self, layer: LayerWeights) -> LayerExperts | None:
        """Return the routed experts among a layer's tensors, if there are any."""
        stacked = [record for record in layer.tensors if self._is_of_experts(record)]
        if not stacked:
            return None
        experts = (tuple(slice_of(r, i) for r in stacked) for i in range(self.n_experts))
        return LayerExperts(tuple(experts), self.n_experts_used, is_at_once=True)

    def _is_of_experts(self, record: TensorRecord) -> bool:
        """Return whether a tensor is a stack of matrices, one for each expert."""
        is_stack = len(record.shape) == 3 and record.shape[0] == self.n_experts
        is_routed = self.n_experts > self.n_experts_used > 0
        return is_stack and is_routed and EXPERT_TENSOR.fullmatch(record.name) is not None

    def state_input_bytes(self, num_tokens: int) -> int:
        """Return the maximum bytes of what recurrent layers put into their states in a pass, in
        float32: channels before and after convolutions, gates and betas. Mamba's do not count."""
        n_numbers = 0
        for layer in self.layers:
            if any(record.name.endswith(_MAMBA_TENSOR) for record in layer.tensors):
                continue
            for record in layer.tensors:
                if _CONVOLUTION_TENSOR.search(record.name):
                    n_numbers += record.shape[0] * (2 * num_tokens + record.shape[-1])
                elif record.name.endswith(_GATE_TENSOR):
                    n_numbers += record.shape[0] * 2 * num_tokens
        return 4 * n_numbers

    def kv_bytes_per_token(
        self, type_k: str = "f16", type_v: str = "f16", *, flash_attention: bool = False
    ) -> int:
        """Return bytes of KV cache per token, all layers in full length; see KvShape.

        Exact for models with attention in every layer; for hybrids an upper bound, without the
        recurrent state of constant size per sequence.
        """
        return self.kv_shape.bytes_per_token(type_k, type_v, flash_attention=flash_attention)


def load_gguf_model(path: str | os.PathLike[str]) -> GgufModel:
    """Read and check the header of a GGUF model (all splits, where `path` is one of them).

    Raises:
        GgufError: a file is missing, malformed or incomplete, or a value is out of range.
        UnsupportedModel: the file is valid but not a causal language model.
    """
    index = GgufIndex.from_path(path)
    keys = _identify(index)
    n_counted = keys.integer("block_count", 1, MAX_LAYERS)
    n_layers = n_counted - keys.integer("nextn_predict_layers", 0, n_counted - 1, 0)
    hidden_size = keys.integer("embedding_length", 1, MAX_HIDDEN_SIZE)
    check_epsilons(keys)
    layers, non_layer, of_mtp = _group(index, keys, n_counted, n_layers)
    is_recurrent = _is_recurrent(keys, index)
    if not is_recurrent:  # some that do not run have tables of integers: see refuse_untried
        check_formats(index.values())
    if keys.architecture in _RECURRENT:
        kv_shape = KvShape()
    else:
        keeps_kv = [_keeps_kv(records) for records in layers]
        kv_shape = read_kv_shape(keys, n_counted, hidden_size, keeps_kv)
    n_experts, n_used = count_experts(keys, index)
    check_graph(keys, n_layers, n_used, len(index))
    return GgufModel(
        path=index.paths[0],
        index=index,
        architecture=keys.architecture,
        n_layers=n_layers,
        vocab_size=_vocab_size(index, hidden_size),
        max_context=keys.integer("context_length", 1, MAX_CONTEXT),
        hidden_size=hidden_size,
        layers=tuple(LayerWeights(tuple(records)) for records in layers),
        non_layer_records=tuple(non_layer),
        mtp_records=tuple(of_mtp),
        is_tied="output.weight" not in index,
        n_experts=n_experts,
        n_experts_used=n_used,
        is_recurrent=is_recurrent,
        sliding_window=keys.integer("attention.sliding_window", 0, MAX_CONTEXT, 0) or None,
        kv_shape=kv_shape,
    )


def _identify(index: GgufIndex) -> Keys:
    """Return the keys of its architecture, if it decodes text from left to right."""
    path, metadata = index.paths[0], index.metadata
    refuse_other_kinds(path, metadata, index.keys())
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        raise GgufError(f"{path} names no general.architecture: it is no model, or split 1 of one")
    keys = Keys(path, metadata, architecture)
    if keys.integer("num_loops", 0, MAX_LAYERS, 1) > 1:
        raise UnsupportedModel(f"{path} ({architecture}) is {LOOPED}")
    return keys


def _group(
    index: GgufIndex, keys: Keys, n_counted: int, n_layers: int
) -> tuple[list[list[TensorRecord]], list[TensorRecord], list[TensorRecord]]:
    """Return the tensors of each layer, non-layer tensors, and those for multi-token prediction."""
    layers: list[list[TensorRecord]] = [[] for _ in range(n_layers)]
    non_layer, of_mtp = [], []
    for record in index.values():
        match = _LAYER_TENSOR.match(record.name)
        number = int(match.group(1)) if match else -1
        if number < 0:
            non_layer.append(record)
        elif number < n_layers:
            layers[number].append(record)
        elif number < n_counted:
            of_mtp.append(record)
        else:
            raise GgufError(
                f"{record.path} holds {record.name!r}, but {keys.full('block_count')} is "
                f"{n_counted}: the file is damaged"
            )
    missing = [number for number, records in enumerate(layers) if not records]
    if missing:
        raise GgufError(
            f"{keys.path} holds no tensors of {len(missing)} of its {n_layers} layers (blk."
            f"{missing[0]} is the first): it is incomplete, get it again"
        )
    return layers, non_layer, of_mtp


def _vocab_size(index: GgufIndex, hidden_size: int) -> int:
    """Return the rows of the embedding, with which head and token list must agree."""
    path = index.paths[0]
    embedding = index.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{path} has no token_embd.weight: it is no complete language model")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden_size:
        raise GgufError(
            f"{path} has token_embd.weight of shape {embedding.shape} for a hidden size of "
            f"{hidden_size}: the file is damaged"
        )
    num_tokens = embedding.shape[0]
    head = index.get("output.weight", embedding)
    if head.shape[:1] != (num_tokens,):
        raise GgufError(f"{path} has a head of shape {head.shape} for {num_tokens} embeddings")
    check_vocabulary(path, index.metadata, num_tokens)
    return num_tokens


def _is_recurrent(keys: Keys, names: Iterable[str]) -> bool:
    if keys.architecture in _RECURRENT or keys.architecture in _HYBRID:
        return True
    return keys.any_below(*_RECURRENT_KEYS) or any(_RECURRENT_TENSOR.match(name) for name in names)


def _keeps_kv(records: list[TensorRecord]) -> bool:
    """Return whether a layer has attention: not if it has a recurrent part and no keys."""
    names = [record.name for record in records]
    if not any(map(_RECURRENT_TENSOR.match, names)) or any(map(_KEY_TENSOR.match, names)):
        return True
    # Linear attention (Qwen3-Next) has a fused projection with a gate, and caches no keys.
    roles = {name.split(".")[2] for name in names}
    return "attn_qkv" in roles and "attn_gate" not in roles
