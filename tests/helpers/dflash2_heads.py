"""Tiny random DFlash 2 heads: as checkpoints beside tiny targets, and as GGUF files for llama.cpp's
own graph of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VOCAB
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYERS, save_dflash_head
from llama_eagle3 import llama_batch, llama_context, next_states

TOP_K, TAPS, GROUP, RANK, HIDDEN = 4, 3, 8, 8, 32
_SECOND = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}
_GGUF_OTHERS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
"""Names of llama.cpp's architecture dflash (gguf-py/gguf/tensor_mapping.py)."""


def save_dflash2_head(
    directory: Path, *, seed: int = 1, vocab_size: int = VOCAB, **changes: Any
) -> Path:
    """Write a random fp32 head; changes: of its dflash_config."""
    import torch
    from safetensors.torch import load_file, save_file

    second = {**_SECOND, **changes}
    save_dflash_head(
        directory, seed=seed, architectures=["DFlash2DraftModel"], vocab_size=vocab_size
    )
    path = directory / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed + 1)

    def random(*shape: int, scale: float = 0.25) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    n_groups, rank = HIDDEN // GROUP, second["selector_rank"]
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            kernel = random(2, TAPS, HIDDEN)
            kernel[:, 0] += 1.0
            tensors[f"{name}.base_kernel"] = kernel
            tensors[f"{name}.kernel_projection.weight"] = random(2 * TAPS * n_groups, HIDDEN)
    selector = "candidate_selector"
    tensors[f"{selector}.predecessor_codebook"] = random(vocab_size, rank, scale=1.0)
    tensors[f"{selector}.successor_codebook"] = random(vocab_size, rank, scale=1.0)
    tensors[f"{selector}.hidden_projection.weight"] = random(rank, HIDDEN, scale=1.0)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["dflash_config"] |= second
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_gguf(head: Path, target: Path, path: Path) -> Path:
    """Write a head with the embedding and output head of its target, as llama.cpp's converter."""
    import gguf
    from safetensors.torch import load_file
    from tiny_gguf import add_tokens
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    own = load_file(head / "model.safetensors")
    named = {_gguf_name(name): value for name, value in own.items()}
    named["token_embd.weight"] = model.get_input_embeddings().weight.detach()
    named["output.weight"] = model.get_output_embeddings().weight.detach()
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in TARGET_LAYERS])
    writer.add_uint32("dflash.block_size", BLOCK_SIZE)
    for key, value in _SECOND.items():
        writer.add_uint32(f"dflash.{key}", value)
    add_tokens(writer, VOCAB)
    for name, value in named.items():
        writer.add_tensor(name, np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    if name in _GGUF_OTHERS:
        return _GGUF_OTHERS[name]
    _, layer, part = name.split(".", 2)
    stem = part.removesuffix(".weight")
    return f"blk.{layer}.{_GGUF_LAYER[stem]}{part.removeprefix(stem)}"


class LlamaDFlash2:
    """A head in llama.cpp, with one sequence."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def transitions(self, states: np.ndarray, pending: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [block - 1, k], scores [block - 1, k, k]) after a context with these
        states [n, layers * hidden] of the target."""
        from backends.ggml.library import load_library

        library = load_library()
        with llama_batch([0] * len(states), 0, states, has_tokens=False) as batch:
            assert library.llama_decode(self._context, batch) == 0
        tokens = [pending] + [MASK_TOKEN_ID] * (BLOCK_SIZE - 1)
        with llama_batch(tokens, len(states)) as batch:
            assert library.llama_decode(self._context, batch) == 0
        rows = next_states(self._context, BLOCK_SIZE, HIDDEN)[1:, : TOP_K + TOP_K**2]
        return rows[:, :TOP_K].astype(int), rows[:, TOP_K:].reshape(-1, TOP_K, TOP_K)


@contextmanager
def llama_dflash2(path: Path) -> Iterator[LlamaDFlash2]:
    from backends.ggml.library import load_library

    library = load_library()
    with llama_context(path) as context:
        library.llama_set_causal_attn(context, False)
        yield LlamaDFlash2(context)
