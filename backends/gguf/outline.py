"""Outline of a GGUF file that llama.cpp would make of a Llama, Qwen3, Qwen3-MoE, gpt-oss or a
Qwen3.5 (dense or mixture), from its sizes.

Number formats are those that llama-quantize chooses without an importance matrix
(`llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp); gpt-oss has its experts as published,
in MXFP4, and all other matrices in Q8_0. There is no vocabulary in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.contract.backend import UnsupportedModel
from offload.distribution import install_command
from offload.formats.gguf_header import row_bytes
from offload.formats.outline import write_outline

Q4_K_M, Q8_0, F16, MXFP4 = "Q4_K_M", "Q8_0", "F16", "MXFP4"
FILE_TYPES = (Q4_K_M, Q8_0, F16, MXFP4)
GPT_OSS = "gpt-oss"
_SHARED_VALUES = 80
"""Layers of a 70B, whose attention values 8 heads share: they get a bit more."""


@dataclass(frozen=True)
class LinearAttention:
    """Sizes of Gated DeltaNet layers; one in `full_attention_interval` is one of attention."""

    num_key_heads: int
    num_value_heads: int
    head_dim: int
    conv_kernel_dim: int = 4
    full_attention_interval: int = 4

    @property
    def value_dim(self) -> int:
        return self.num_value_heads * self.head_dim

    @property
    def mixed_dim(self) -> int:
        """Channels of the convolution: keys twice, and values."""
        return 2 * self.num_key_heads * self.head_dim + self.value_dim


@dataclass(frozen=True)
class GgufSizes:
    """Sizes of a model; names are those of config.json."""

    architecture: str
    """llama, qwen3, qwen3moe, gpt-oss, qwen35 or qwen35moe."""
    hidden_size: int
    intermediate_size: int
    """In a mixture, the size of one expert."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    sliding_window: int = 0
    """Window of every other layer; 0: none."""
    linear: LinearAttention | None = None
    shared_expert_intermediate_size: int = 0

    def is_linear(self, layer: int) -> bool:
        """Return whether a layer has a recurrent state instead of keys and values."""
        return self.linear is not None and bool((layer + 1) % self.linear.full_attention_interval)


def write_gguf_outline(path: Path, sizes: GgufSizes, file_type: str) -> int:
    """Write the outline of a model in one of FILE_TYPES; return the file's bytes.

    Raises UnsupportedModel without the package gguf.
    """
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModel(f"GGUF models need gguf: {install_command('gguf')}") from error

    writer = gguf.GGUFWriter(None, sizes.architecture)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(sizes.vocab_size)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    is_hybrid = sizes.linear is not None
    n_rotated = sizes.head_dim // 4 if is_hybrid else sizes.head_dim
    writer.add_rope_dimension_count(n_rotated)
    if is_hybrid:  # positions on three axes, which are the same in a text
        third = n_rotated // 6
        writer.add_rope_dimension_sections([n_rotated // 2 - 2 * third, third, third, 0])
    writer.add_layer_norm_rms_eps(1e-5)
    if sizes.sliding_window:
        writer.add_sliding_window(sizes.sliding_window)
    if sizes.shared_expert_intermediate_size:
        writer.add_expert_shared_feed_forward_length(sizes.shared_expert_intermediate_size)
    if sizes.linear is not None:
        _add_linear(writer, sizes.linear)
    if sizes.num_experts:
        writer.add_expert_count(sizes.num_experts)
        writer.add_expert_used_count(sizes.num_experts_per_tok)
        writer.add_expert_feed_forward_length(sizes.intermediate_size)
    n_bytes = 0
    for name, shape in _tensors(sizes):
        dtype = _number_format(name, len(shape), sizes, file_type)
        size = math.prod(shape[:-1]) * row_bytes(dtype, shape[-1])
        kind = gguf.GGMLQuantizationType[dtype]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        n_bytes += size + -size % gguf.GGUF_DEFAULT_ALIGNMENT
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    header = path.read_bytes()
    header += bytes(-len(header) % gguf.GGUF_DEFAULT_ALIGNMENT)
    write_outline(path, header, len(header) + n_bytes)
    return len(header) + n_bytes


def _add_linear(writer: Any, linear: LinearAttention) -> None:
    writer.add_full_attention_interval(linear.full_attention_interval)
    writer.add_ssm_conv_kernel(linear.conv_kernel_dim)
    writer.add_ssm_state_size(linear.head_dim)
    writer.add_ssm_group_count(linear.num_key_heads)
    writer.add_ssm_time_step_rank(linear.num_value_heads)
    writer.add_ssm_inner_size(linear.value_dim)


def gguf_outline_bytes(sizes: GgufSizes, file_type: str) -> int:
    """Return the bytes of a model's tensors in one of FILE_TYPES."""
    return sum(
        math.prod(shape[:-1])
        * row_bytes(_number_format(name, len(shape), sizes, file_type), shape[-1])
        for name, shape in _tensors(sizes)
    )


def _tensors(sizes: GgufSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the row-major shape of each tensor."""
    hidden = sizes.hidden_size
    yield "token_embd.weight", (sizes.vocab_size, hidden)
    for i in range(sizes.num_hidden_layers):
        mixer = _linear_attention(sizes) if sizes.is_linear(i) else _attention(sizes)
        layer = {"attn_norm.weight": (hidden,), **mixer, **_feed_forward(sizes)}
        yield from ((f"blk.{i}.{name}", shape) for name, shape in layer.items())
    yield "output_norm.weight", (hidden,)
    if not sizes.tie_word_embeddings:
        yield "output.weight", (sizes.vocab_size, hidden)


Shapes = dict[str, tuple[int, ...]]


def _attention(sizes: GgufSizes) -> Shapes:
    hidden, head_dim = sizes.hidden_size, sizes.head_dim
    n_outputs = sizes.num_attention_heads * head_dim
    queries = n_outputs if sizes.linear is None else 2 * n_outputs  # with their gates
    keys = sizes.num_key_value_heads * head_dim
    result: Shapes = {
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, n_outputs),
    }
    if sizes.architecture == GPT_OSS:
        biases = {name.replace("weight", "bias"): shape[:1] for name, shape in result.items()}
        return {**result, **biases, "attn_sinks.weight": (sizes.num_attention_heads,)}
    if sizes.architecture != "llama":
        result |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    return result


def _linear_attention(sizes: GgufSizes) -> Shapes:
    linear, hidden = sizes.linear, sizes.hidden_size
    assert linear is not None, "the layer is one"
    n_heads = linear.num_value_heads
    return {
        "attn_qkv.weight": (linear.mixed_dim, hidden),
        "attn_gate.weight": (linear.value_dim, hidden),
        "ssm_conv1d.weight": (linear.mixed_dim, linear.conv_kernel_dim),
        "ssm_dt.bias": (n_heads,),
        "ssm_a": (n_heads,),
        "ssm_beta.weight": (n_heads, hidden),
        "ssm_alpha.weight": (n_heads, hidden),
        "ssm_norm.weight": (linear.head_dim,),
        "ssm_out.weight": (hidden, linear.value_dim),
    }


def _feed_forward(sizes: GgufSizes) -> Shapes:
    hidden, inner, n_experts = sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
    is_after_attention = sizes.linear is not None or sizes.architecture == GPT_OSS
    norm = "post_attention_norm.weight" if is_after_attention else "ffn_norm.weight"
    kinds = {"gate": (inner, hidden), "down": (hidden, inner), "up": (inner, hidden)}
    if not n_experts:
        return {norm: (hidden,)} | {f"ffn_{kind}.weight": kinds[kind] for kind in kinds}
    result: Shapes = {norm: (hidden,), "ffn_gate_inp.weight": (n_experts, hidden)}
    result |= {f"ffn_{kind}_exps.weight": (n_experts, *kinds[kind]) for kind in kinds}
    if sizes.architecture == GPT_OSS:
        result |= {f"ffn_{kind}_exps.bias": (n_experts, kinds[kind][0]) for kind in kinds}
        result["ffn_gate_inp.bias"] = (n_experts,)
    shared = sizes.shared_expert_intermediate_size
    if shared:
        result |= {
            "ffn_gate_inp_shexp.weight": (hidden,),
            "ffn_gate_shexp.weight": (shared, hidden),
            "ffn_down_shexp.weight": (hidden, shared),
            "ffn_up_shexp.weight": (shared, hidden),
        }
    return result


def _number_format(name: str, rank: int, sizes: GgufSizes, file_type: str) -> str:
    if rank == 1 or name.endswith(".bias") or "ffn_gate_inp" in name or "conv1d" in name:
        return "F32"
    if file_type == MXFP4:
        return MXFP4 if "_exps" in name else Q8_0
    if file_type != Q4_K_M:
        return file_type
    is_head = name == ("token_embd.weight" if sizes.tie_word_embeddings else "output.weight")
    if is_head:
        return "Q6_K"
    if any(part in name for part in ("attn_v", "attn_qkv", "ffn_down")):
        number, n_layers = int(name.split(".")[1]), sizes.num_hidden_layers
        if _has_more_bits(number, n_layers):
            return "Q6_K"
        if "attn_v" in name and n_layers == _SHARED_VALUES:
            return "Q5_K"
    return "Q4_K"


def _has_more_bits(layer: int, n_layers: int) -> bool:
    """Return llama.cpp's `use_more_bits`: the first and last eighth, and every third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2
