"""A gpt-oss with random weights, in the tensors and formats of the published checkpoints.

Its architecture (attention sinks, sliding windows, biases, clamped SwiGLU) is no other model's, so
it cannot be grown from a small one (bench/synth). Bytes, shapes and arithmetic are those of the
published model; the text is noise. Random routers take all experts about equally often, which is
the worst case for an expert cache. Ids without a token in the tokenizer have logits of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.published.layout import GptOssLayout
from bench.synth.checkpoint import (
    DEFAULT_SHARD_BYTES,
    GrowReport,
    replace_folder,
    split_shards,
    write_shards,
)
from bench.synth.files import check_folder, write_side_files
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel
from bench.synth.tensors import Fill, Patch, TensorPlan
from bench.synth.weights import TensorMaker
from offload.storage.unfinished import unfinished
from offload.units import Progress, format_bytes

_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "max_position_embeddings": 131_072,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Entries of the published config.json that do not depend on sizes."""


def draw_gpt_oss(
    tokenizer_dir: Path,
    out_dir: Path,
    shape: LlamaShape,
    *,
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> GrowReport:
    """Write a checkpoint of `shape` with random weights; only a chunk of a tensor is in memory.

    Args:
        tokenizer_dir: checkpoint whose tokenizer and special ids it gets.
        out_dir: folder for the checkpoint; must be empty or absent unless `force`.
        shape: sizes; `intermediate_size` counts for nothing, the experts have theirs.

    Raises:
        SynthError: the shape does not fit, the disk lacks space, or `out_dir` is not empty.
    """
    source, layout = SourceModel(tokenizer_dir), GptOssLayout()
    if shape.experts is None or shape.recurrent is not None:
        raise SynthError("a gpt-oss has routed experts and attention in all layers")
    if shape.vocab_size < source.shape.vocab_size:
        raise SynthError(
            f"the tokenizer has {source.shape.vocab_size} tokens: give --vocab-size as many"
        )
    plans = list(tensor_plans(shape, source.shape.vocab_size))
    shards, n_bytes = split_shards(plans, layout, shard_bytes), sum(map(layout.n_bytes, plans))
    out_dir = out_dir.expanduser().absolute()
    with unfinished(out_dir) as partial:
        check_folder(out_dir, source.folder, n_bytes, force)
        try:
            partial.mkdir(parents=True)
            maker = TensorMaker(source.read, layout.form_of, seed)
            write_shards(partial, shards, maker, layout, n_bytes, progress)
            write_side_files(partial, source, _config(source, shape), _card(shape, n_bytes, seed))
            replace_folder(partial, out_dir)
        except OSError as error:
            raise SynthError(f"cannot write {out_dir}: {error.strerror or error}") from error
    n_weights = sum(plan.n_weights for plan in plans)
    return GrowReport(out_dir, shape, n_weights, n_bytes, len(shards))


def shape_of_bytes(shape: LlamaShape, n_bytes: int | None, vocab_size: int | None) -> LlamaShape:
    """Return the shape with the vocabulary, and with the number of layers nearest to `n_bytes`.

    Raises SynthError if that is not within a fifth.
    """
    shape = replace(shape, vocab_size=vocab_size or shape.vocab_size)
    if n_bytes is None:
        return shape
    smallest, next_size = (model_bytes(replace(shape, n_layers=n)) for n in (1, 2))
    layer_bytes = next_size - smallest
    n_layers = max(1, 1 + round((n_bytes - smallest) / layer_bytes))
    shape = replace(shape, n_layers=n_layers)
    if not 0.8 * n_bytes < model_bytes(shape) < 1.25 * n_bytes:
        raise SynthError(
            f"cannot reach {format_bytes(n_bytes)}: whole layers, from {format_bytes(smallest)} on "
            f"in steps of {format_bytes(layer_bytes)}"
        )
    return shape


def model_bytes(shape: LlamaShape) -> int:
    """Return the bytes of all weights."""
    layout = GptOssLayout()
    return sum(map(layout.n_bytes, tensor_plans(shape, shape.vocab_size)))


def tensor_plans(shape: LlamaShape, n_tokens: int) -> Iterator[TensorPlan]:
    """Yield all tensors in the order of writing.

    n_tokens: ids from this one on have a row of zeros in the output head.
    """
    table = (shape.vocab_size, shape.hidden_size)
    yield TensorPlan("model.embed_tokens.weight", table, Fill.RANDOM)
    for index in range(shape.n_layers):
        yield from _layer(shape, f"model.layers.{index}.")
    yield TensorPlan("model.norm.weight", (shape.hidden_size,), Fill.GAIN)
    rows = Patch(0, 0, n_tokens, shape.hidden_size)
    yield TensorPlan("lm_head.weight", table, Fill.ZERO, (rows,))


def _layer(shape: LlamaShape, prefix: str) -> Iterator[TensorPlan]:
    assert shape.experts is not None
    d, n, f = shape.hidden_size, shape.experts.n, shape.experts.intermediate_size
    queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield TensorPlan(f"{prefix}input_layernorm.weight", (d,), Fill.GAIN)
    for name, n_out, n_in in (
        ("self_attn.q_proj", queries, d),
        ("self_attn.k_proj", keys, d),
        ("self_attn.v_proj", keys, d),
        ("self_attn.o_proj", d, queries),
        ("mlp.router", n, d),
    ):
        yield TensorPlan(f"{prefix}{name}.weight", (n_out, n_in), Fill.RANDOM)
        yield TensorPlan(f"{prefix}{name}.bias", (n_out,), Fill.RANDOM)
    yield TensorPlan(f"{prefix}self_attn.sinks", (shape.n_heads,), Fill.RANDOM)
    yield TensorPlan(f"{prefix}post_attention_layernorm.weight", (d,), Fill.GAIN)
    for name, n_out, n_in in (("gate_up_proj", 2 * f, d), ("down_proj", d, f)):
        yield TensorPlan(f"{prefix}mlp.experts.{name}", (n, n_out, n_in), Fill.RANDOM)
        yield TensorPlan(f"{prefix}mlp.experts.{name}_bias", (n, n_out), Fill.RANDOM)


def _config(source: SourceModel, shape: LlamaShape) -> dict[str, Any]:
    assert shape.experts is not None
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    kinds = ("sliding_attention", "full_attention")
    return _CONFIG | {
        **{name: source.config.get(name) for name in special},
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.experts.intermediate_size,
        "num_hidden_layers": shape.n_layers,
        "layer_types": [kinds[i % 2] for i in range(shape.n_layers)],
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "num_local_experts": shape.experts.n,
        "num_experts_per_tok": shape.experts.n_used,
        "vocab_size": shape.vocab_size,
    }


def _card(shape: LlamaShape, n_bytes: int, seed: int) -> str:
    return f"""# Random weights in the shape of gpt-oss: for benchmarks only

This is **not** a trained model, and its text is noise. `specdec-bench synth` drew its weights
(seed {seed}) in the tensors and formats of the published gpt-oss: experts in MXFP4, the rest in
bf16, {format_bytes(n_bytes)} in {shape.n_layers} layers. Its routers take all experts about equally
often.
"""
