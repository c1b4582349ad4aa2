"""Small random models to grow, and shapes to grow them to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.synth.shapes import LlamaShape

HEAD_DIM = 8
SMALL = LlamaShape(32, 48, 2, 4, 2, HEAD_DIM, 96, tied=False)
LARGE = LlamaShape(240, 112, 5, 6, 3, HEAD_DIM, 96, tied=False)


def save_source(folder: Path, shape: LlamaShape, seed: int = 0, **options: object) -> Path:
    """Write a random fp32 Llama, Qwen3-MoE if the shape has experts, or hybrid (Qwen3.5, NemotronH)
    if it has recurrent layers, with weights large enough to tell layers apart."""
    from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3MoeConfig

    if shape.mamba is not None:
        return _save_random(folder, nemotron_config(shape), seed)
    kind = LlamaConfig if shape.experts is None else Qwen3MoeConfig
    if shape.recurrent is not None:
        kind = Qwen3_5TextConfig
        names = ("full_attention", "linear_attention")
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
        options |= {
            "layer_types": [names[shape.is_recurrent(i)] for i in range(shape.n_layers)],
            "linear_num_key_heads": shape.recurrent.n_key_heads,
            "linear_num_value_heads": shape.recurrent.n_value_heads,
            "linear_key_head_dim": shape.recurrent.head_dim,
            "linear_value_head_dim": shape.recurrent.head_dim,
            "linear_conv_kernel_dim": shape.recurrent.kernel,
            "rope_parameters": rope,
        }
    if shape.experts is not None:
        options |= {
            "num_experts": shape.experts.n,
            "num_experts_per_tok": shape.experts.n_used,
            "moe_intermediate_size": shape.experts.intermediate_size,
            "norm_topk_prob": True,
            # Head norms have it too, though their width stays: growing changes its effect.
            "rms_norm_eps": 1e-7,
        }
    config = kind(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=128,
        **{"rms_norm_eps": 1e-3, **options},  # large, to reveal a wrong epsilon
    )
    return _save_random(folder, config, seed)


def nemotron_config(shape: LlamaShape) -> Any:
    from transformers import NemotronHConfig

    assert shape.mamba is not None
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return NemotronHConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        layers_block_type=[names[kind] for kind in shape.mamba.pattern],
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=128,
        mamba_num_heads=shape.mamba.n_heads,
        mamba_head_dim=shape.mamba.head_dim,
        n_groups=shape.mamba.n_groups,
        ssm_state_size=shape.mamba.state_size,
        conv_kernel=shape.mamba.kernel,
        layer_norm_epsilon=1e-3,  # large, to reveal a wrong epsilon
    )


def _save_random(folder: Path, config: Any, seed: int) -> Path:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    return folder


def altered(shape: LlamaShape, **changes: object) -> LlamaShape:
    return replace(shape, **changes)


def save_source_with_tokenizer(folder: Path, shape: LlamaShape, seed: int = 0) -> Path:
    """Write `save_source` with a byte-level BPE no larger than the shape's vocabulary, for GGUF."""
    import tokenizers

    save_source(folder, shape, seed)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=shape.vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def main(): return value", "for x in range(10): y"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79, 3, 2, 38]])
    with torch.no_grad():
        return model(ids).logits[0]


def assert_same_function(source: Path, grown: Path, n_vocab: int = SMALL.vocab_size) -> None:
    expected, got = logits_of(source), logits_of(grown)[:, :n_vocab]
    assert expected.std() > 0.1  # otherwise equality would say little
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
