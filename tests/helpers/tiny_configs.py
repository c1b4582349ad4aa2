"""Tiny configs of transformers' own families, from what each config class declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 6,
    # Mixtures
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "zero_expert_num": 4,
    "shared_expert_intermediate_size": 40,
    "shared_experts_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "dense_intermediate_size": 48,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 64,
    # Recurrent layers
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 8,
    "mamba_head_dim": 8,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "n_groups": 2,
    "ssm_state_size": 8,
    "mamba_ssm_state_size": 8,
    # Per-layer embeddings
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    # Old names
    "n_embd": 32,
    "n_layer": 4,
    "n_layers": 4,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 256,
    "d_model": 32,
    "dff": 48,
    "emb_dim": 32,
    "num_layers": 4,
    "num_heads": 4,
    "ffn_dim": 48,
    "attention_heads": 4,
    "word_embed_proj_dim": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "vocab_size": 16,
    # Audio
    "num_blocks": 2,
    "ext_pw_out_channel": 32,
    "depthwise_separable_out_channel": 32,
    "nemo_conv_channels": 32,
    # Tokens of images
    "num_embeddings": 16,
    "projection_dim": 32,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
"""Sizes of an encoder inside of a vision part."""
_PROJECTOR: dict[str, Any] = {
    "alignment_intermediate_size": 48,
    "projector_hidden_size": 48,
    "out_hidden_size": 32,
}
"""Sizes of wrappers, between the parts."""
_TOKENS = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MROPE = "glm46v glm4v glm_ocr glmga qwen2_5_vl qwen2_vl qwen2_5_omni_thinker".split()
"""Families whose rotary embeddings are in sections for time, height and width."""


def _rope(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mlp"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 20,
        "swa_kv_lora_rank": 24,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": _ROUTED,
    "dots1": {**_ROUTED, "n_shared_experts": 1},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_vl": {"text_config": {"layer_types": ["conv", "full_attention"] * 2}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "use_mem_rope": False},
    "zaya": {"num_experts_per_tok": 1},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 24]}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "step3p7": {"text_config": {"sliding_window": 6}},
    "molmo2": {"vision_config": {"image_size": [28, 28]}},
    "muse_spark": {"vision_config": {"num_hidden_layers": 4}},
    "unlimited_ocr": {
        "vision_config": {
            "sam_config": {**_ENCODER, "output_channels": 32, "mlp_dim": 48},
            "encoder_config": _ENCODER,
        }
    },
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    **{name: {"text_config": {"rope_parameters": _rope(1, 1, 2)}} for name in _MROPE},
    "glm4v_moe": {"text_config": {"rope_parameters": _rope(1, 1, 0)}},
}
"""Values that single families need; a part's are added to its others."""


def tiny_config(model_type: str) -> Any:
    """Return a config of a family with layers that compute something in milliseconds."""
    whole = AutoConfig.for_model(model_type)
    values = _declared(whole, _SIZES)
    for name, part in vars(whole).items():
        if name.endswith("_config") and hasattr(part, "model_type"):
            sizes = _SIZES if name == "text_config" else _VISION
            values[name] = {"model_type": part.model_type, **_declared(part, sizes)}
    values |= {name: VOCAB - 1 for name in _TOKENS if hasattr(whole, name)}
    if "text_config" in values:
        values = {k: v for k, v in values.items() if k.endswith("_config") or k in _TOKENS}
        values |= _declared(whole, _PROJECTOR)
    for name, own in _OWN.get(model_type, {}).items():
        values[name] = {**values[name], **own} if isinstance(values.get(name), dict) else own
    return AutoConfig.for_model(model_type, **values)


def _declared(config: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a config's class declares and that are set."""
    config.allow_global_per_layer_attribute_access = True
    values = {name: size for name, size in sizes.items() if _is_set(config, name)}
    if values.get("kv_lora_rank"):
        values["num_key_value_heads"] = sizes["num_attention_heads"]
    return values


def _is_set(config: Any, name: str) -> bool:
    declared = getattr(type(config), name, None)
    is_settable = not isinstance(declared, property) or declared.fset is not None
    return hasattr(type(config), name) and is_settable and getattr(config, name, None) is not None


def save_tiny_family(model_type: str, directory: Path) -> Any:
    """Write a random fp32 checkpoint of a family; return transformers' auto class for it."""
    config = tiny_config(model_type)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(directory, max_shard_size="40KB")
    return auto
