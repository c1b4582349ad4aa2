"""Tiny EAGLE-3 heads in the layouts of their formats: random ones, and a head of its target."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import VOCAB

if TYPE_CHECKING:
    import torch

N_LAYERS = 6
"""Layers of a target: the head takes the inputs of the layers 2, 3 and 3 by default."""
N_DRAFT = 40
HIDDEN, N_HEADS, N_KV_HEADS, HEAD_DIM, THETA, EPS = 32, 4, 2, 8, 500.0, 1e-5
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class TinyHead:
    """A head: its tensors by their names in speculators, and what its config says."""

    tensors: dict[str, torch.Tensor]
    target_ids: torch.Tensor | None
    layer_inputs: tuple[int, ...] = (2, 3, 3)
    flags: dict[str, bool] = field(default_factory=dict)
    vocab_size: int = VOCAB

    @property
    def n_kv_heads(self) -> int:
        return len(self.tensors["layers.0.self_attn.k_proj.weight"]) // HEAD_DIM

    @property
    def n_outputs(self) -> int:
        own = self.tensors.get("lm_head.weight")
        return self.vocab_size if own is None else len(own)

    def has(self, flag: str) -> bool:
        return self.flags.get(flag, False)


def new_head(
    *flags: str,
    seed: int = 0,
    layer_inputs: tuple[int, ...] = (2, 3, 3),
    vocab_size: int = VOCAB,
    n_draft: int = N_DRAFT,
    has_own_embedding: bool = False,
    has_own_vocabulary: bool = True,
) -> TinyHead:
    """Return a random head. Its own vocabulary has the target's first and its last token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    assert set(flags) <= set(_FLAGS)
    width, n_kv = len(layer_inputs) * HIDDEN, N_KV_HEADS * HEAD_DIM
    n_outputs = n_draft if has_own_vocabulary else vocab_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, width),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (n_outputs, HIDDEN),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (N_HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (n_kv, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (n_kv, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, N_HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (48, HIDDEN),
        "layers.0.mlp.up_proj.weight": (48, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, 48),
    }
    if "norm_before_fc" in flags:
        shapes["input_norm.weight"] = (width,)
    if "fc_norm" in flags:
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(len(layer_inputs))}
    if has_own_embedding:
        shapes["embed_tokens.weight"] = (vocab_size, HIDDEN)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.25 + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    inner = 1 + torch.randperm(vocab_size - 2, generator=generator)[: n_draft - 2]
    ids = torch.cat([torch.tensor([0, vocab_size - 1]), inner]).sort().values
    own_ids = ids if has_own_vocabulary else None
    return TinyHead(tensors, own_ids, layer_inputs, dict.fromkeys(flags, True), vocab_size)


def bigram_target(directory: Path, vocab_size: int) -> Path:
    """Save a target whose next token depends on the last one alone: its layers add nothing."""
    import torch
    from checkpoints import save_tiny_checkpoint
    from transformers import AutoModelForCausalLM

    save_tiny_checkpoint("llama", directory, num_hidden_layers=N_LAYERS, vocab_size=vocab_size)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, -1] = 0.0  # which `bigram_head` has another use for
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(directory, max_shard_size="40KB")
    return directory


def bigram_head(target: Path, n_draft: int) -> TinyHead:
    """Return a head that knows a `bigram_target`.

    Its queries and keys are one constant, the last number of its embedding, so that by RoPE each
    token attends to itself alone, and its value is the embedding. Hidden states are left out.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target)
    embedding = model.model.embed_tokens.weight.detach()
    vocab_size = len(embedding)
    head = new_head("norm_before_residual", vocab_size=vocab_size, n_draft=n_draft)
    constant = torch.zeros(HIDDEN, 2 * HIDDEN)
    constant.view(N_HEADS, HEAD_DIM, -1)[:, : HEAD_DIM // 2, HIDDEN - 1] = 10.0
    value = torch.eye(HIDDEN, 2 * HIDDEN)
    value[-1] = 0.0
    own = torch.nn.functional.normalize(embedding)
    own[:, -1] = 1.0
    head.tensors.update(
        {
            "embed_tokens.weight": own,
            "layers.0.input_layernorm.weight": torch.ones(HIDDEN),
            "layers.0.hidden_norm.weight": torch.zeros(HIDDEN),
            "layers.0.self_attn.q_proj.weight": constant,
            "layers.0.self_attn.k_proj.weight": constant.clone(),
            "layers.0.self_attn.v_proj.weight": value,
            "layers.0.self_attn.o_proj.weight": torch.eye(HIDDEN),
            "layers.0.mlp.down_proj.weight": torch.zeros(HIDDEN, 48),
            "norm.weight": model.model.norm.weight.detach().clone(),
            "lm_head.weight": model.lm_head.weight.detach()[head.target_ids].clone(),
        }
    )
    return head


# --- files --------------------------------------------------------------------------------------


def save_specforge(head: TinyHead, directory: Path, **overrides: Any) -> Path:
    """Write a head as SafeAILab's and SpecForge's are: `midlayer`, layers by their outputs."""
    config = {
        **_layer_config(head),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": head.n_outputs,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in head.layer_inputs],
        },
        **head.flags,
        **overrides,
    }
    renamed = {name.replace("layers.0.", "midlayer."): x for name, x in head.tensors.items()}
    return _save(directory, config, renamed, head)


def save_speculators(head: TinyHead, directory: Path, **overrides: Any) -> Path:
    """Write a head as speculators does: the layer's config within, layers by their inputs."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.n_outputs,
        "eagle_aux_hidden_state_layer_ids": list(head.layer_inputs),
        "target_hidden_size": None,
        "transformer_layer_config": _layer_config(head),
        **head.flags,
        **overrides,
    }
    return _save(directory, config, dict(head.tensors), head)


def _layer_config(head: TinyHead) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": head.n_kv_heads,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "rope_scaling": None,
        "max_position_embeddings": 256,
        "vocab_size": head.vocab_size,
    }


def _save(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], head: TinyHead
) -> Path:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    if head.target_ids is not None:
        tensors["d2t"] = head.target_ids - torch.arange(len(head.target_ids))
        tensors["t2d"] = torch.isin(torch.arange(head.vocab_size), head.target_ids)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


_GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def save_gguf_head(
    head: TinyHead,
    path: Path,
    quantisation: str = "F32",
    rope_factors: torch.Tensor | None = None,
) -> Path:
    """Write a head as llama.cpp's converter does: rows of queries and keys in its RoPE's order."""
    import gguf
    import numpy as np
    from tiny_gguf import add_tokens

    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(48)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(head.n_kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_vocab_size(head.vocab_size)
    writer.add_array("eagle3.target_layers", list(head.layer_inputs))
    writer.add_uint32("eagle3.target_hidden_size", HIDDEN)
    for flag in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{flag}", head.has(flag))
    add_tokens(writer, head.vocab_size)
    kind = gguf.GGMLQuantizationType[quantisation]
    rotary = {"q_proj": N_HEADS, "k_proj": head.n_kv_heads}
    for name, values in head.tensors.items():
        numbers = values.numpy()
        for projection, n_heads in rotary.items():
            if projection in name:
                halves = numbers.reshape(n_heads, 2, HEAD_DIM // 2, -1)
                numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        is_plain = quantisation == "F32" or numbers.ndim == 1 or numbers.shape[1] % 32
        stored = numbers if is_plain else gguf.quantize(np.ascontiguousarray(numbers), kind)
        raw_dtype = None if is_plain else kind
        writer.add_tensor(_GGUF_NAMES[name], np.ascontiguousarray(stored), raw_dtype=raw_dtype)
    if head.target_ids is not None:
        writer.add_tensor("d2t", head.target_ids.numpy())
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
