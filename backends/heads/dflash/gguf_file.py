"""A DFlash head in a GGUF file, as llama.cpp's converter writes it (architecture dflash).

Metadata beside that of every model (src/models/dflash.cpp):

    dflash.block_size, dflash.target_layers     layers whose *inputs* the head takes: HF's ids + 1
    tokenizer.ggml.mask_token_id
    dflash.attention.sliding_window, dflash.attention.sliding_window_pattern     by layer, optional
    dflash.attention.causal, dflash.embedding_scale, dflash.logit_scale,
    dflash.final_logit_softcapping              optional
    dflash.{conv_kernel_size,conv_group_size,selector_rank,selector_top_k}       DFlash 2

As in llama.cpp, the tokens of a block see later ones in all layers, sliding ones too, unless the
file says that its attention is causal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.sizes import check_figures
from backends.contract.backend import UnsupportedModel
from backends.heads.dflash.config import check_block, qwen3_config
from backends.heads.gguf_tensors import read_numbers
from backends.heads.kinds import DFLASH, OF_DFLASH2
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
_ROPE_SCALING = ("scaling.factor", "scale_linear", "scaling.attn_factor")
"""Keys of RoPE scaling; 1 changes nothing."""
_MAX_SIZE = 1 << 20
_MAX_TOKENS = 1 << 31
_REMEDY = "convert the head again"
_OTHER_FILE = "take the head's safetensors"
_MISSING = object()


class _Header:
    """Values of a head's metadata, each of its type. All methods raise CheckpointError for another
    one, or for a key that is missing without a default."""

    def __init__(self, path: Path, metadata: GgufMetadata) -> None:
        self.path, self._metadata = path, metadata

    def count(
        self,
        key: str,
        default: Any = _MISSING,
        *,
        min_value: int = 1,
        max_value: int = _MAX_SIZE,
    ) -> int:
        """Return a whole number from `min_value` to `max_value`."""
        value = self._value(key, default)
        if type(value) is not int or not min_value <= value <= max_value:
            raise self.fault(key, value, f"a whole number from {min_value} to {max_value}")
        return value

    def positive(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.fault(key, value, "a positive number")
        return float(value)

    def optional(self, key: str) -> float | None:
        """Return a positive number; None where it is missing or 0, as in llama.cpp."""
        return self.positive(key, 1.0) if self._value(key, 0) != 0 else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.fault(key, value, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """Return a list of values of one type."""
        value = self._value(key, _MISSING)
        if not isinstance(value, (list, tuple)) or {type(item) for item in value} != {kind}:
            raise self.fault(key, value, f"a list of {kind.__name__}")
        return list(value)

    def words(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if type(value) is not str:
            raise self.fault(key, value, "text")
        return value

    def num_tokens(self) -> int:
        stored = self._metadata.array_length("tokenizer.ggml.tokens")
        default = _MISSING if stored is None else stored
        return self.count("vocab_size", default, max_value=_MAX_TOKENS)

    def _value(self, key: str, default: Any) -> Any:
        value = self._metadata.get(_full(key), default)
        if value is _MISSING:
            raise CheckpointError(f"{self.path} has no {_full(key)}: {_REMEDY}")
        return value

    def fault(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} has {_full(key)} of {value!r:.40}, must be {expected}: {_REMEDY}"
        )


def _full(key: str) -> str:
    return key if key.startswith("tokenizer.") else f"{DFLASH}.{key}"


def gguf_config(index: GgufIndex, path: Path) -> PreTrainedConfig:
    """Return the config of a head in a GGUF file: see `load_dflash_config`.

    Raises CheckpointError for values that are missing or invalid, UnsupportedModel for heads whose
    layers are not Qwen3's.
    """
    header = _Header(path, index.metadata)
    _refuse_other_heads(header)
    n_layers, stored = header.count("block_count"), num_stored_layers(index)
    if n_layers != stored:
        raise CheckpointError(
            f"{path} has {stored} layers and dflash.block_count of {n_layers}: {_REMEDY}"
        )
    config = qwen3_config(_layers(header, n_layers), _block(header))
    check_figures(config)
    check_block(config, str(path))
    return config


def num_stored_layers(index: GgufIndex) -> int:
    matches = map(_OF_LAYER.fullmatch, index)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def named_tensors(index: GgufIndex, path: Path) -> dict[str, TensorRecord]:
    """Return the tensors by their names in folders. Raises UnsupportedModel for another one."""
    named = {}
    for name, record in index.items():
        if _ROPE_FACTORS.fullmatch(name):
            continue
        known = _name(name)
        if known is None:
            raise UnsupportedModel(
                f"{path} is a draft head of another kind: DFlash has no {name}: take another head, "
                "or leave -md out"
            )
        named[known] = record
    return named


def rope_factors(index: GgufIndex, path: Path, head_dim: int) -> torch.Tensor | None:
    """Return the divisors of RoPE's frequencies, float32 [head_dim / 2]; None without any.

    Raises CheckpointError for another shape, or for numbers that are not positive.
    """
    shape = (head_dim // 2,)
    for name, record in index.items():
        if not _ROPE_FACTORS.fullmatch(name):
            continue
        if tuple(record.shape) != shape:
            raise CheckpointError(
                f"{path} has RoPE factors of the shape {tuple(record.shape)}, must be {shape}: "
                f"{_REMEDY}"
            )
        factors = read_numbers(record)
        if not bool(((factors > 0) & factors.isfinite()).all()):
            raise CheckpointError(f"{path} has RoPE factors that are not positive: {_REMEDY}")
        return factors
    return None


def _name(stored: str) -> str | None:
    match = _OF_LAYER.fullmatch(stored)
    if match is None:
        return _GLOBAL_NAMES.get(stored)
    layer, part = match.groups()
    return f"layers.{layer}.{_LAYER_NAMES[part]}" if part in _LAYER_NAMES else None


def _refuse_other_heads(header: _Header) -> None:
    scaling = header.words("rope.scaling.type", "none")
    activation = header.words("hidden_activation", "silu")
    reasons = {key: header.optional(key) is not None for key in _OTHER_HEADS}
    scales = any(header.optional(f"rope.{key}") not in (None, 1.0) for key in _ROPE_SCALING)
    reasons["RoPE scaling"] = scaling != "none" or scales
    reasons[f"the activation {activation!r:.40}"] = activation != "silu"
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UnsupportedModel(
            f"{header.path} is a DFlash head with {reason}, which is not supported in GGUF: "
            f"{_OTHER_FILE}"
        )


def _layers(header: _Header, n_layers: int) -> Mapping[str, Any]:
    """Return Qwen3's keys of the head's layers."""
    num_heads, width = header.count("attention.head_count"), header.count("embedding_length")
    head_dim = header.count("attention.key_length", max(1, width // num_heads))
    if header.count("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(
            f"{header.path} is a DFlash head with RoPE in a part of each head, which is not "
            f"supported: {_OTHER_FILE}"
        )
    window = header.count("attention.sliding_window", 0, min_value=0, max_value=_MAX_TOKENS)
    slides = [False] * n_layers
    if window:
        slides = header.items("attention.sliding_window_pattern", bool)
    if len(slides) != n_layers:
        key = "attention.sliding_window_pattern"
        raise header.fault(key, slides, f"a list of {n_layers}, one for each layer")
    return {
        "hidden_size": width,
        "intermediate_size": header.count("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.count("context_length", max_value=_MAX_TOKENS),
        "rms_norm_eps": header.positive("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": header.positive("rope.freq_base", 1e4),
        },
        "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        "is_causal": header.flag("attention.causal", False),
        "vocab_size": header.num_tokens(),
    }


def _block(header: _Header) -> Mapping[str, Any]:
    """Return the keys of `dflash_config`. The embedding's scale is 1 where the file has none, as
    in llama.cpp."""
    layers = [layer - 1 for layer in header.items("target_layers", int)]
    mask = header.count("tokenizer.ggml.mask_token_id", min_value=0, max_value=_MAX_TOKENS)
    second = {key: header.count(key, 0, min_value=0) for key in OF_DFLASH2}
    return {
        "block_size": header.count("block_size"),
        "mask_token_id": mask,
        "target_layer_ids": layers,
        "input_embedding_scale": header.optional("embedding_scale") or 1.0,
        "output_multiplier": header.optional("logit_scale") or 1.0,
        "final_logit_softcapping": header.optional("final_logit_softcapping"),
        **{key: number for key, number in second.items() if number},
    }
