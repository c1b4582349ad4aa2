"""Tiny random checkpoints of every family that specdec runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {**_COMMON, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", _GQA),
    "llama-tied": ("LlamaConfig", {**_GQA, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", _GQA),
    "qwen2-sliding": (
        "Qwen2Config",
        {**_GQA, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 8}),
    "mistral": ("MistralConfig", {**_GQA, "sliding_window": 6}),
    "gemma": ("GemmaConfig", {**_GQA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_GQA, "head_dim": 8, "sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", {**_GQA, "head_dim": 8, "sliding_window": 6}),
    "phi3": ("Phi3Config", {**_GQA, "sliding_window": None}),
    "gpt-neox": ("GPTNeoXConfig", _COMMON),
    "bloom": (
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 0},
    ),
    "gpt2": (  # the attention mask is passed by position
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "xglm": (  # the same
        "XGLMConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "num_layers": 3,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
        },
    ),
    "opt": (  # its layers are nested one level deeper, positions are learned
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 256,
            "pad_token_id": 0,
        },
    ),
    "minicpm3": (  # dense multi-head latent attention
        "MiniCPM3Config",
        {
            **_COMMON,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}

_MOE = {**_GQA, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": 12,
    "n_group": 2,
    "topk_group": 1,
}

MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2-moe": (  # a shared expert behind a gate; the second layer is dense
        "Qwen2MoeConfig",
        {**_MOE, "num_experts": 12, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**_MOE, "num_experts": 12, "head_dim": 8}),
    "mixtral": (
        "MixtralConfig",
        {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "olmoe": ("OlmoeConfig", {**_GQA, "num_experts": 12, "num_experts_per_tok": 3}),
    "gpt-oss": (  # one tensor for all experts, with biases; sinks and windows
        "GptOssConfig",
        {
            **_GQA,
            "head_dim": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
        },
    ),
    "glm4-moe": (  # scores are corrected; the first layer is dense
        "Glm4MoeConfig",
        {
            **_MOE,
            "head_dim": 8,
            "n_routed_experts": 12,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "deepseek-v2": ("DeepseekV2Config", {**_MOE, **_LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek-v3": ("DeepseekV3Config", {**_MOE, **_LATENT}),
}
"""Mixtures of experts."""


def save_tiny_checkpoint(family: str, directory: Path, seed: int = 0, **overrides: object) -> Path:
    """Write a random fp32 checkpoint of `family`, sharded, with weights large enough to matter."""
    import torch
    import transformers

    config_name, values = (FAMILIES | MIXTURES)[family]
    config = getattr(transformers, config_name)(**{**values, **overrides})
    generator = torch.Generator().manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(directory, max_shard_size="40KB")
    return directory


def in_dtype(directory: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Copy a checkpoint to another number format."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).save_pretrained(folder)
    return folder
