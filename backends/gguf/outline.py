"""Outline of a GGUF file that llama.cpp would make of a Llama, Qwen3 or Qwen3-MoE, from its sizes.

Number formats are those that llama-quantize chooses without an importance matrix
(`llama_tensor_get_type` in llama.cpp's src/llama-quant.cpp). There is no vocabulary in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.formats.gguf_header import row_bytes
from offload.formats.outline import write_outline

Q4_K_M, Q8_0, F16 = "Q4_K_M", "Q8_0", "F16"
FILE_TYPES = (Q4_K_M, Q8_0, F16)
_SHARED_VALUES = 80
"""Layers of a 70B, whose attention values 8 heads share: they get a bit more."""


@dataclass(frozen=True)
class GgufSizes:
    """Sizes of a model; names are those of config.json."""

    architecture: str
    """llama, qwen3 or qwen3moe."""
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


def write_gguf_outline(path: Path, sizes: GgufSizes, file_type: str) -> int:
    """Write the outline of a model in one of FILE_TYPES; return the file's bytes."""
    import gguf

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
    writer.add_rope_dimension_count(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
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


def gguf_outline_bytes(sizes: GgufSizes, file_type: str) -> int:
    """Return the bytes of a model's tensors in one of FILE_TYPES."""
    return sum(
        math.prod(shape[:-1])
        * row_bytes(_number_format(name, len(shape), sizes, file_type), shape[-1])
        for name, shape in _tensors(sizes)
    )


def _tensors(sizes: GgufSizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the row-major shape of each tensor."""
    hidden, inner, n_experts = sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
    queries = sizes.num_attention_heads * sizes.head_dim
    keys = sizes.num_key_value_heads * sizes.head_dim
    yield "token_embd.weight", (sizes.vocab_size, hidden)
    for i in range(sizes.num_hidden_layers):
        layer = {
            "attn_norm": (hidden,),
            "attn_q": (queries, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, queries),
            "ffn_norm": (hidden,),
        }
        if sizes.architecture != "llama":
            layer |= {"attn_q_norm": (sizes.head_dim,), "attn_k_norm": (sizes.head_dim,)}
        if n_experts:
            layer |= {
                "ffn_gate_inp": (n_experts, hidden),
                "ffn_gate_exps": (n_experts, inner, hidden),
                "ffn_down_exps": (n_experts, hidden, inner),
                "ffn_up_exps": (n_experts, inner, hidden),
            }
        else:
            layer |= {
                "ffn_gate": (inner, hidden),
                "ffn_down": (hidden, inner),
                "ffn_up": (inner, hidden),
            }
        yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in layer.items())
    yield "output_norm.weight", (hidden,)
    if not sizes.tie_word_embeddings:
        yield "output.weight", (sizes.vocab_size, hidden)


def _number_format(name: str, rank: int, sizes: GgufSizes, file_type: str) -> str:
    if rank == 1 or "ffn_gate_inp" in name:
        return "F32"
    if file_type != Q4_K_M:
        return file_type
    is_head = name == ("token_embd.weight" if sizes.tie_word_embeddings else "output.weight")
    if is_head:
        return "Q6_K"
    if "attn_v" in name or "ffn_down" in name:
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
