"""A DFlash head in a GGUF file, as llama.cpp's converter writes it (architecture dflash).

Metadata beside that of every model (src/models/dflash.cpp):

    dflash.block_size, dflash.target_layers     layers whose *inputs* the head takes: HF's ids + 1
    tokenizer.ggml.mask_token_id
    dflash.attention.sliding_window, dflash.attention.sliding_window_pattern     by layer, optional
    dflash.attention.causal, dflash.embedding_scale, dflash.logit_scale,
    dflash.final_logit_softcapping              optional
    dflash.{conv_kernel_size,conv_group_size,selector_rank,selector_top_k}       DFlash 2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.sizes import check_figures
from backends.contract.backend import UnsupportedModel, one_line
from backends.heads.dflash.config import check_block, qwen3_config
from backends.heads.gguf_tensors import read_numbers
from backends.heads.kinds import DFLASH, OF_DFLASH2
from offload.errors import SpecdecError
from offload.formats.gguf_header import GgufMetadata
from offload.formats.gguf_index import GgufIndex
from offload.formats.tensors import CheckpointError, TensorRecord

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
_GLOBAL_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = re.compile(r"(blk\.0\.)?rope_freqs\.weight")
_OTHER_HEADS = ("attention.scale", "attention.value_scale", "hyper_connection.count")
"""Keys of heads whose layers are not Qwen3's."""
_REMEDY = "take the head's safetensors"


def gguf_config(path: Path, metadata: GgufMetadata) -> PreTrainedConfig:
    """Return the config of a head in a GGUF file: see `load_dflash_config`.

    Raises CheckpointError for values that are missing or invalid, UnsupportedModel for heads whose
    layers are not Qwen3's.
    """
    _refuse_other_heads(path, metadata)
    try:
        config = qwen3_config(_layers(path, metadata), _block(path, metadata))
        check_figures(config)
        check_block(config, str(path))
    except SpecdecError:
        raise
    except Exception as error:  # a value may be of any type
        raise CheckpointError(
            f"{path} describes no head that can be run ({one_line(error)}): convert the head again"
        ) from error
    return config


def named_tensors(index: GgufIndex) -> dict[str, TensorRecord]:
    """Return the tensors by their names in folders; others have the file's."""
    return {
        _name(name): record for name, record in index.items() if not _ROPE_FACTORS.fullmatch(name)
    }


def rope_factors(index: GgufIndex) -> torch.Tensor | None:
    """Return the divisors of RoPE's frequencies, float32 [head_dim / 2]; None without any."""
    for name, record in index.items():
        if _ROPE_FACTORS.fullmatch(name):
            return read_numbers(record)
    return None


def _name(stored: str) -> str:
    match = _OF_LAYER.fullmatch(stored)
    if match is None:
        return _GLOBAL_NAMES.get(stored, stored)
    layer, part = match.groups()
    return f"layers.{layer}.{_LAYER_NAMES[part]}" if part in _LAYER_NAMES else stored


def _value(path: Path, metadata: GgufMetadata, key: str, default: Any = None) -> Any:
    name = key if key.startswith("tokenizer.") else f"{DFLASH}.{key}"
    result = metadata.get(name, default)
    if result is None:
        raise CheckpointError(f"{path} has no {name}: convert the head again")
    return result


def _refuse_other_heads(path: Path, metadata: GgufMetadata) -> None:
    def value(key: str, default: Any) -> Any:
        return _value(path, metadata, key, default)

    scaling, activation = value("rope.scaling.type", "none"), value("hidden_activation", "silu")
    reasons = {key: bool(value(key, 0)) for key in _OTHER_HEADS}
    reasons |= {
        f"{scaling} RoPE scaling": scaling != "none",
        f"the activation {activation}": activation != "silu",
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UnsupportedModel(
            f"{path} is a DFlash head with {reason}, which is not supported in GGUF: {_REMEDY}"
        )


def _layers(path: Path, metadata: GgufMetadata) -> Mapping[str, Any]:
    """Return Qwen3's keys of the head's layers."""

    def value(key: str, default: Any = None) -> Any:
        return _value(path, metadata, key, default)

    head_count, width = value("attention.head_count"), value("embedding_length")
    head_dim, n_layers = value("attention.key_length", width // head_count), value("block_count")
    if value("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{path} is a DFlash head with RoPE in a part of each head, which is not supported: "
            f"{_REMEDY}"
        )
    window = value("attention.sliding_window", 0)
    pattern = value("attention.sliding_window_pattern", [False] * n_layers)
    types = ["sliding_attention" if window and slides else "full_attention" for slides in pattern]
    n_tokens = metadata.array_length("tokenizer.ggml.tokens")
    return {
        "hidden_size": width,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": head_count,
        "num_key_value_heads": value("attention.head_count_kv", head_count),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base", 1e4)},
        "layer_types": types,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "is_causal": bool(value("attention.causal", False)),
        "vocab_size": value("vocab_size", n_tokens),
    }


def _block(path: Path, metadata: GgufMetadata) -> Mapping[str, Any]:
    """Return the keys of `dflash_config`. The embedding's scale is 1 where the file has none, as
    in llama.cpp."""

    def value(key: str, default: Any = None) -> Any:
        return _value(path, metadata, key, default)

    block = {
        "block_size": value("block_size"),
        "mask_token_id": value("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": [int(layer) - 1 for layer in value("target_layers")],
        "input_embedding_scale": value("embedding_scale", 0) or 1.0,
        "output_multiplier": value("logit_scale", 0) or 1.0,
        "final_logit_softcapping": value("final_logit_softcapping", 0) or None,
    }
    second = {key: value(key, 0) for key in OF_DFLASH2}
    return block | {key: number for key, number in second.items() if number}
