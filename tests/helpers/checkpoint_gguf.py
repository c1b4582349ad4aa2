"""Tiny Llama and Qwen3 checkpoints as GGUF in float32, with a vocabulary of words."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def save_checkpoint_gguf(directory: Path, path: Path, quantisation: str = "F32") -> Path:
    """Write a checkpoint of model_type llama or qwen3.

    quantisation: of matrices whose rows fit it.
    """
    import gguf
    from tiny_gguf import add_tokens
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory).float()
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    add_tokens(writer, config.vocab_size)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = gguf.GGMLQuantizationType[quantisation]
    for name, values in model.state_dict().items():
        numbers = values.numpy()
        if config.model_type == "llama":
            numbers = _in_rope_order(name, numbers, heads)
        is_plain = numbers.ndim == 1 or numbers.shape[1] % gguf.GGML_QUANT_SIZES[kind][0]
        stored = numbers if is_plain else gguf.quantize(np.ascontiguousarray(numbers), kind)
        raw_dtype = None if is_plain or quantisation == "F32" else kind
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(stored), raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.weight", name)
    return _NAMES[name] if layer is None else f"blk.{layer[1]}.{_PARTS[layer[2]]}.weight"


def _in_rope_order(name: str, numbers: np.ndarray, heads: dict[str, int]) -> np.ndarray:
    """Return rows of queries and keys in the order of llama.cpp's RoPE for Llama."""
    for projection, n_heads in heads.items():
        if f".{projection}." in name:
            halves = numbers.reshape(n_heads, 2, numbers.shape[0] // n_heads // 2, -1)
            return halves.swapaxes(1, 2).reshape(numbers.shape)
    return numbers
