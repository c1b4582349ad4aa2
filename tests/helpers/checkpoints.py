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

_SHARED = {  # the last layers use keys and values of earlier ones
    **_GQA,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 6,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}

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
    "gemma3n": ("Gemma3nTextConfig", _SHARED),
    "gemma4": ("Gemma4TextConfig", {**_SHARED, "global_head_dim": 16}),  # heads differ by layer
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

_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}
HYBRIDS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3.5": (  # Gated DeltaNet
        "Qwen3_5TextConfig",
        {
            **_GQA,
            "head_dim": 8,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
    "lfm2": (  # short convolutions
        "Lfm2Config",
        {**_GQA, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    ),
    "bamba": ("BambaConfig", {**_GQA, **_MAMBA, "attn_layer_indices": [1]}),  # Mamba-2
    "falcon-h1": ("FalconH1Config", {**_GQA, **_MAMBA, "mamba_d_ssm": 64}),  # both in each layer
}
"""Models with recurrent layers."""

HYBRID_MIXTURES: dict[str, tuple[str, dict[str, object]]] = {
    "kimi-linear": (  # Kimi Delta Attention beside latent attention
        "KimiLinearConfig",
        {
            **_MOE,
            "num_key_value_heads": 4,
            "kv_lora_rank": 12,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "jamba": (  # Mamba
        "JambaConfig",
        {
            **_GQA,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "mamba_expand": 2,
        },
    ),
}
"""Mixtures of experts with recurrent layers."""


def save_tiny_checkpoint(family: str, directory: Path, seed: int = 0, **overrides: object) -> Path:
    """Write a random fp32 checkpoint of `family`, sharded, with weights large enough to matter."""
    import torch
    import transformers

    config_name, values = (FAMILIES | MIXTURES | HYBRIDS | HYBRID_MIXTURES)[family]
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
