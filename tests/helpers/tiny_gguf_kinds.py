"""Metadata of tiny models by architecture, as llama.cpp reads it.

Keys are below the architecture's name, except those that begin with "/"; "__" stands for a dot.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 96,
    "attention__head_count": 4,
    "attention__head_count_kv": 2,
    "attention__layer_norm_rms_epsilon": 1e-5,
    "attention__layer_norm_epsilon": 1e-5,
    "rope__dimension_count": 16,
    "rope__freq_base": 10000.0,
}
_MOE: dict[str, Any] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 2,
}
_NO_GQA: dict[str, Any] = {"attention__head_count_kv": 4}
_WIDE: dict[str, Any] = {
    "attention__key_length": 32,
    "attention__value_length": 32,
    "rope__dimension_count": 32,
}
_SSM: dict[str, Any] = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 128,
    "ssm__state_size": 32,
    "ssm__time_step_rank": 4,
    "ssm__group_count": 2,
}
_DELTA: dict[str, Any] = {
    **_WIDE,
    "rope__dimension_sections": [4, 2, 2, 0],
    "rope__dimension_count": 16,
    **_SSM,
    "full_attention_interval": 4,
}
_MLA: dict[str, Any] = {
    "attention__head_count_kv": 1,
    "attention__q_lora_rank": 32,
    "attention__kv_lora_rank": 32,
    "attention__key_length": 48,
    "attention__value_length": 32,
    "attention__key_length_mla": 32,
    "attention__value_length_mla": 16,
    "rope__dimension_count": 16,
    "leading_dense_block_count": 1,
}
_MIXED_HEADS: dict[str, Any] = {
    "attention__head_count_kv": [0, 2, 0, 2],
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # full or sliding attention
    "llama": {},
    "llama-mixture": {"architecture": "llama", **_MOE},
    "qwen2": {},
    "qwen2moe": _MOE,
    "qwen3": _WIDE,
    "qwen3moe": {**_WIDE, **_MOE},
    "gemma": _WIDE,
    "gemma2": {**_WIDE, "attention__sliding_window": 16},
    "gemma3": {**_WIDE, "attention__sliding_window": 16, "block_count": 6},
    "gemma3n": {
        **_WIDE,
        "block_count": 22,
        "attention__sliding_window": 16,
        "attention__sliding_window_pattern": 2,
        "embedding_length_per_layer_input": 16,
    },
    "gemma4": {
        **_WIDE,
        "block_count": 5,
        "attention__sliding_window": 16,
        "attention__sliding_window_pattern": [True, True, True, True, False],
        "embedding_length_per_layer_input": 16,
        "attention__shared_kv_layers": 0,
        "attention__key_length_swa": 16,
        "attention__value_length_swa": 16,
        "rope__dimension_count_swa": 16,
        "rope__freq_base_swa": 10000.0,
    },
    "gpt-oss": {**_WIDE, **_MOE, "attention__sliding_window": 16},
    "glm4": {},
    "glm4moe": {**_MOE, "leading_dense_block_count": 1},
    "deepseek": {**_MOE, **_NO_GQA, "leading_dense_block_count": 1},
    "deepseek2": {**_MLA, **_MOE},
    "minimax-m2": {**_WIDE, **_MOE},
    "mistral3": {},
    "mistral4": {**_MLA, **_MOE},
    "llama4": {**_MOE, "interleave_moe_layer_step": 2, "expert_used_count": 1},
    "phi2": _NO_GQA,
    "phi3": {"rope__scaling__original_context_length": 512},
    "starcoder": {"attention__head_count_kv": 1},
    "starcoder2": {},
    "falcon": {"attention__head_count_kv": 1},
    "bloom": _NO_GQA,
    "mpt": {**_NO_GQA, "attention__max_alibi_bias": 8.0},
    "gpt2": _NO_GQA,
    "gptneox": {**_NO_GQA, "use_parallel_residual": True},
    "stablelm": {},
    "command-r": {"logit_scale": 0.1},
    "cohere2": {"logit_scale": 0.1, "attention__sliding_window": 16},
    "olmo": _NO_GQA,
    "olmo2": {},
    "olmoe": {**_MOE, **_NO_GQA},
    "granite": {"logit_scale": 2.0, "residual_scale": 0.5, "embedding_scale": 2.0},
    "granitemoe": {**_MOE, "logit_scale": 2.0, "residual_scale": 0.5},
    "exaone": {},
    "exaone4": {"attention__sliding_window": 16},
    "nemotron": {},
    "smollm3": {},
    "ernie4_5": _MOE,
    "ernie4_5-moe": {
        **_MOE,
        "interleave_moe_layer_step": 1,
        "leading_dense_block_count": 1,
    },
    "hunyuan-dense": {},
    "hunyuan-moe": _MOE,
    "internlm2": {},
    "minicpm": {},
    "baichuan": _NO_GQA,
    "xverse": _NO_GQA,
    "orion": {},
    "seed_oss": {},
    "apertus": {
        "/xielu.alpha_n": 1.0,
        "/xielu.alpha_p": 1.0,
        "/xielu.beta": 1.0,
        "/xielu.eps": 1e-7,
    },
    "dbrx": {**_MOE, "attention__clamp_kqv": 8.0},
    "phimoe": _MOE,
    "dots1": {**_MOE, **_NO_GQA, "leading_dense_block_count": 1},
    "bailingmoe2": {**_MOE, "leading_dense_block_count": 1},
    # recurrent
    "qwen35": _DELTA,
    "qwen35moe": {**_DELTA, **_MOE},
    "qwen3next": {**_DELTA, **_MOE},
    "nemotron_h": {
        **_SSM,
        "feed_forward_length": [0, 0, 96, 0],
        "attention__head_count_kv": [0, 2, 0, 0],
    },
    "nemotron_h_moe": {
        **_SSM,
        **_MOE,
        "feed_forward_length": [0, 0, 96, 0],
        "attention__head_count_kv": [0, 2, 0, 0],
        "expert_weights_norm": True,
    },
    "granitehybrid": {**_SSM, **_MIXED_HEADS, "logit_scale": 2.0, "residual_scale": 0.5},
    "granitehybrid-mixture": {
        "architecture": "granitehybrid",
        **_SSM,
        **_MIXED_HEADS,
        **_MOE,
        "logit_scale": 2.0,
        "residual_scale": 0.5,
    },
    "lfm2": {"shortconv__l_cache": 3, **_MIXED_HEADS},
    "lfm2moe": {"shortconv__l_cache": 3, **_MIXED_HEADS, **_MOE, "leading_dense_block_count": 1},
    "falcon-h1": {**_SSM, **_WIDE},
    "jamba": {**_SSM, **_MIXED_HEADS, **_MOE},
    "mamba": {**_SSM, "attention__head_count": 0, "attention__head_count_kv": 0},
    "mamba2": {**_SSM, "attention__head_count": 0, "attention__head_count_kv": 0},
    "plamo2": {**_SSM, **_MIXED_HEADS, "ssm__group_count": 0},
    "kimi-linear": {
        **_SSM,
        **_MLA,
        **_MOE,
        "attention__head_count_kv": [0, 1, 0, 1],
        "kda__head_dim": 16,
    },
    "kimi-k3": {
        **_SSM,
        **_MLA,
        **_MOE,
        "attention__head_count_kv": [0, 1, 0, 1],
        "kda__head_dim": 16,
        "attn_res__block_size": 12,
        "activation__situ_beta": 4.0,
        "activation__situ_linear_beta": 25.0,
        "kda__gate_lower_bound": -5.0,
    },
    "rwkv6": {"wkv__head_size": 16, "time_mix_extra_dim": 16, "time_decay_extra_dim": 16},
    "rwkv7": {
        "wkv__head_size": 16,
        "attention__decay_lora_rank": 8,
        "attention__iclr_lora_rank": 8,
        "attention__value_residual_mix_lora_rank": 8,
        "attention__gate_lora_rank": 8,
    },
}
"""Metadata by name; the architecture is the name unless "architecture" says another."""

_HEAD: dict[str, Any] = {"block_count": 5, "nextn_predict_layers": 1}
_WINDOWS: dict[str, Any] = {
    "attention__sliding_window": 16,
    "attention__sliding_window_pattern": [True, True, True, False, False],
}
WITH_HEADS: dict[str, dict[str, Any]] = {
    **{
        f"{name}-head": {"architecture": name, **ARCHITECTURES[name], **_HEAD}
        for name in ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2")
    },
    "cohere2moe-head": {
        "architecture": "cohere2moe",
        **_WIDE,
        **_MOE,
        **_HEAD,
        "logit_scale": 0.1,
        "leading_dense_block_count": 1,
        "attention__sliding_window": 16,
    },
    "hy_v3-head": {
        "architecture": "hy_v3",
        **_WIDE,
        **_MOE,
        **_HEAD,
        "leading_dense_block_count": 1,
    },
    "nemotron_h_moe-head": {
        "architecture": "nemotron_h_moe",
        **ARCHITECTURES["nemotron_h_moe"],
        **_HEAD,
        "feed_forward_length": [0, 0, 96, 0, 96],
        "attention__head_count_kv": [0, 2, 0, 0, 2],
    },
    "step35-head": {"architecture": "step35", **_WIDE, **_MOE, **_HEAD, **_WINDOWS},
}
"""Models of 4 layers with an MTP head."""
OWN_TABLES = ("glm4moe-head",)
"""Models whose head has an embedding and an output head of its own."""

RECURRENT = (
    "qwen35 qwen35moe qwen3next nemotron_h nemotron_h_moe granitehybrid granitehybrid-mixture lfm2 "
    "lfm2moe falcon-h1 jamba mamba mamba2 plamo2 kimi-linear kimi-k3"
).split()
REFUSED = ("rwkv6", "rwkv7")
