"""Shapes of the embedded pair, and writer of its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from bench.train.data import END_OF_TEXT, MAX_POSITIONS, save_tokenizer
from specdec.training.trainable import in_bf16

HEAD_DIM = 128  # as in large Llamas, so that a grown target keeps its rotary embedding


def _config(tokenizer: Tokenizer, hidden: int, ffn: int, n_layers: int) -> LlamaConfig:
    separator = tokenizer.token_to_id(END_OF_TEXT)
    return LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=n_layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=separator,
        eos_token_id=separator,
        pad_token_id=None,  # padding_idx would freeze the separator's embedding
    )


def target_config(tokenizer: Tokenizer) -> LlamaConfig:
    return _config(tokenizer, hidden=384, ffn=1024, n_layers=6)


def draft_config(tokenizer: Tokenizer) -> LlamaConfig:
    return _config(tokenizer, hidden=256, ffn=704, n_layers=2)


def build_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Build a new model whose layers begin as no-ops (zero output projections)."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def forward_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [batch_size, length, vocab_size] of full windows of ids, on any device."""
    with in_bf16(model.device):
        hidden = model.model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
        return model.lm_head(hidden)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token of ids [batch_size, length + 1]."""
    logits = forward_logits(model, ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().to(logits.device))


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    card: str,
    head: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a bf16 checkpoint that transformers loads, and its model card.

    head: tensors beside the model's own, by name: those of a draft head.
    """
    config = model.config
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    exported = type(model)(config)
    exported.load_state_dict(model.state_dict())
    exported.to(torch.bfloat16)
    exported.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.eos_token_id,
    )
    exported.save_pretrained(partial)
    if head is not None:
        path = partial / SAFE_WEIGHTS_NAME
        tensors = load_file(path) | {n: t.detach().bfloat16().cpu() for n, t in head.items()}
        save_file(tensors, path, metadata={"format": "pt"})
    save_tokenizer(tokenizer, partial)
    (partial / "README.md").write_text(card, encoding="utf-8")
    for path in partial.iterdir():
        path.chmod(0o644)  # safetensors are written for their owner only
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
