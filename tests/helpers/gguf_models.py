"""Tiny random GGUF models of several architectures, written with the gguf package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

VOCAB = 96
HIDDEN = 64
FEED_FORWARD = 96
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
N_CTX = 512


@dataclass(frozen=True)
class Family:
    """Differences between the files of the architectures."""

    architecture: str
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_post_norm: bool = False
    is_fused: bool = False  # attn_qkv, and gate and up in one tensor
    n_experts: int = 0
    head_dim: int = HEAD_DIM
    sliding_window: int = 0


FAMILIES = {
    "llama": Family("llama"),
    "llama-tied": Family("llama", is_tied=True),
    "qwen2": Family("qwen2", has_qkv_bias=True, head_dim=HIDDEN // HEADS),
    "qwen3": Family("qwen3", has_qk_norm=True),
    "gemma": Family("gemma", is_tied=True),
    "gemma2": Family("gemma2", is_tied=True, has_post_norm=True, sliding_window=8),
    "phi3": Family("phi3", is_fused=True, head_dim=HIDDEN // HEADS),
    "mixtral": Family("llama", n_experts=4),
    "qwen3moe": Family("qwen3moe", has_qk_norm=True, n_experts=4),
}


def save_tiny_gguf(
    family: str,
    path: Path,
    *,
    seed: int = 0,
    dtype: str = "F32",
    n_layers: int = 3,
    n_splits: int = 1,
    hidden: int = HIDDEN,
    feed_forward: int = FEED_FORWARD,
    vocab: int = VOCAB,
    n_ctx: int = N_CTX,
    n_experts: int | None = None,
) -> Path:
    """Write a model; return the path of its (first) file.

    dtype: of matrices, where its blocks fit their rows; Q8_0 elsewhere.
    n_experts: of a mixture, where it is to have others than the family's.
    """
    import gguf

    kind = FAMILIES[family]
    kind = replace(kind, n_experts=n_experts or kind.n_experts)
    writer = gguf.GGUFWriter(
        path,
        kind.architecture,
        split_max_tensors=0 if n_splits == 1 else -(-(4 + 12 * n_layers) // n_splits),
    )
    writer.add_context_length(n_ctx)
    _add_metadata(writer, kind, n_layers, hidden, feed_forward, vocab)
    rng = np.random.default_rng(seed)
    qtype = gguf.GGMLQuantizationType[dtype]
    for name, shape in _tensors(kind, n_layers, hidden, feed_forward, vocab):
        if len(shape) == 1:
            values = 1 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
            writer.add_tensor(name, values - (0 if "norm" in name else 1))
            continue
        scale = 1.0 if name.startswith("token_embd") else shape[-1] ** -0.5
        values = scale * rng.standard_normal(shape, dtype=np.float32)
        if dtype == "F32" or "gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            fits = shape[-1] % gguf.GGML_QUANT_SIZES[qtype][0] == 0
            its_type = qtype if fits else gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, _quantize(values, its_type), raw_dtype=its_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if n_splits == 1:
        return path
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[0]


def _quantize(values: np.ndarray, qtype) -> np.ndarray:
    """Quantise by the gguf package, or by ggml for types that it lacks (K-quants)."""
    import gguf

    try:
        return gguf.quantize(values, qtype)
    except NotImplementedError:
        from backends.ggml.operators import load_ggml

    n_columns = values.shape[-1]
    block, n_bytes = gguf.GGML_QUANT_SIZES[qtype]
    made = np.zeros((*values.shape[:-1], n_columns // block * n_bytes), dtype=np.uint8)
    addresses = (values.ctypes.data, made.ctypes.data)
    load_ggml().quantize(int(qtype), *addresses, 0, values.size // n_columns, n_columns, None)
    return made


def _add_metadata(
    writer, kind: Family, n_layers: int, hidden: int, feed_forward: int, vocab: int
) -> None:
    import gguf

    writer.add_embedding_length(hidden)
    writer.add_block_count(n_layers)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(kind.head_dim)
    writer.add_value_length(kind.head_dim)
    writer.add_rope_dimension_count(kind.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocab)
    if kind.n_experts:
        writer.add_expert_count(kind.n_experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(feed_forward)
    if kind.sliding_window:
        writer.add_sliding_window(kind.sliding_window)
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_merges(["w 3"])
    writer.add_token_list(words)
    writer.add_token_scores([-float(i) for i in range(vocab)])
    writer.add_token_types([*types, *[gguf.TokenType.NORMAL] * (vocab - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _tensors(
    kind: Family, n_layers: int, hidden: int, feed_forward: int, vocab: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Return tensor names and shapes, row-major."""
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (vocab, hidden)),
        ("output_norm.weight", (hidden,)),
    ]
    if not kind.is_tied:
        tensors.append(("output.weight", (vocab, hidden)))
    for i in range(n_layers):
        layer = _attention(kind, hidden) + _feed_forward(kind, hidden, feed_forward)
        tensors += [(f"blk.{i}.{name}", shape) for name, shape in layer]
    return tensors


def _attention(kind: Family, hidden: int) -> list[tuple[str, tuple[int, ...]]]:
    n_q, n_kv = HEADS * kind.head_dim, KV_HEADS * kind.head_dim
    tensors: list[tuple[str, tuple[int, ...]]] = [("attn_norm.weight", (hidden,))]
    if kind.is_fused:
        tensors.append(("attn_qkv.weight", (n_q + 2 * n_kv, hidden)))
    for name, num_tokens in (("q", n_q), ("k", n_kv), ("v", n_kv)):
        if not kind.is_fused:
            tensors.append((f"attn_{name}.weight", (num_tokens, hidden)))
        if kind.has_qkv_bias:
            tensors.append((f"attn_{name}.bias", (num_tokens,)))
    if kind.has_qk_norm:
        tensors += [(f"attn_{name}_norm.weight", (kind.head_dim,)) for name in "qk"]
    if kind.has_post_norm:
        tensors.append(("post_attention_norm.weight", (hidden,)))
    return [*tensors, ("attn_output.weight", (hidden, n_q))]


def _feed_forward(
    kind: Family, hidden: int, feed_forward: int
) -> list[tuple[str, tuple[int, ...]]]:
    tensors: list[tuple[str, tuple[int, ...]]] = [("ffn_norm.weight", (hidden,))]
    if kind.has_post_norm:
        tensors.append(("post_ffw_norm.weight", (hidden,)))
    if kind.n_experts:
        up, down = (
            (kind.n_experts, feed_forward, hidden),
            (kind.n_experts, hidden, feed_forward),
        )
        return [
            *tensors,
            ("ffn_gate_inp.weight", (kind.n_experts, hidden)),
            ("ffn_gate_exps.weight", up),
            ("ffn_up_exps.weight", up),
            ("ffn_down_exps.weight", down),
        ]
    if kind.is_fused:
        return [
            *tensors,
            ("ffn_up.weight", (2 * feed_forward, hidden)),
            ("ffn_down.weight", (hidden, feed_forward)),
        ]
    return [
        *tensors,
        ("ffn_gate.weight", (feed_forward, hidden)),
        ("ffn_up.weight", (feed_forward, hidden)),
        ("ffn_down.weight", (hidden, feed_forward)),
    ]
