"""Shape of a GGUF model, from its header alone; neither llama.cpp nor torch is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from backends.gguf.hparams import (
    CACHE_TYPES,
    MAX_CONTEXT,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    Keys,
    KvShape,
)
from backends.gguf.model import GgufModel, load_gguf_model
from backends.gguf.recurrent import refuse_untried
from backends.shapes.gguf_states import has_attention, layer_states
from backends.shapes.shape import (
    FFN,
    HEAD,
    OTHER,
    OUTPUT,
    QKV,
    AttentionShape,
    LayerShape,
    Matrix,
    ModelShape,
)
from offload.formats.tensors import TensorRecord
from offload.units import MIB

# Every n-th layer has full attention, the others a sliding window: src/models/*.cpp of llama.cpp
# (set_swa_pattern), for files that do not say it themselves.
_FULL_LAYER_PERIOD = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "cohere2": 4,
    "olmo2": 4,
    "exaone4": 4,
    "gpt-oss": 2,
}
_ACTIVATION_BYTES = 4  # ggml computes in float32
_PROCESS_BYTES = 470 * MIB
"""Process memory: memory plans of the large grown mixtures have 455 to 477 MiB of base, headroom,
activations and tables."""


def gguf_shape(path: Path, type_k: str = "f16", type_v: str = "f16") -> ModelShape:
    """Read the header of a GGUF model (of all splits).

    Args:
        type_k, type_v: number formats of the KV cache.

    Raises GgufError and UnsupportedModel as `load_gguf_model`.
    """
    model = load_gguf_model(path)
    refuse_untried(model)
    keys = Keys(model.path, model.index.metadata, model.architecture)
    n_used = model.n_experts_used or 1
    windows, notes = _windows(model, keys)
    attention = _attention(model, keys, windows, type_k, type_v)
    layers = tuple(
        LayerShape(
            tuple(_matrices(layer.tensors, n_used)),
            attention[i],
            sum(record.n_bytes for record in layer.tensors),
            layer_states(layer.tensors, keys, model.hidden_size) if model.is_recurrent else (),
        )
        for i, layer in enumerate(model.layers)
    )
    head = model.index["token_embd.weight" if model.is_tied else "output.weight"]
    return ModelShape(
        path=path,
        family=model.architecture,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        layers=layers,
        head=_matrix(HEAD, head, 1),
        non_layer_bytes=sum(record.n_bytes for record in model.non_layer_records),
        activation_bytes=_ACTIVATION_BYTES,
        process_bytes=_PROCESS_BYTES,
        notes=notes,
    )


def _matrices(records: Iterable[TensorRecord], n_used: int) -> Iterable[Matrix]:
    for record in records:
        # blk.<number>.<name>.weight; biases of experts have two dimensions, too.
        name, _, kind = record.name.split(".", 2)[2].rpartition(".")
        if len(record.shape) >= 2 and kind == "weight":
            yield _matrix(_role(name), record, n_used if name.endswith("_exps") else None)


def _matrix(role: str, record: TensorRecord, n_active: int | None) -> Matrix:
    """n_active: matrices of a 3-dimensional tensor that a row uses; None for all."""
    n_out, n_in = record.shape[-2:]
    n_matrices = math.prod(record.shape[:-2])
    return Matrix(
        role=role,
        n_in=n_in,
        n_out=n_out,
        n_bytes=record.n_bytes,
        number_format=record.dtype,
        n_matrices=n_matrices,
        n_active=n_matrices if n_active is None else min(n_active, n_matrices),
    )


def _role(name: str) -> str:
    if name.startswith("attn_output"):
        return OUTPUT
    if name.startswith("attn_"):
        return QKV
    return FFN if name.startswith("ffn_") else OTHER


def _attention(
    model: GgufModel, keys: Keys, windows: tuple[int | None, ...], type_k: str, type_v: str
) -> tuple[AttentionShape | None, ...]:
    """Return the attention of each layer; the last layers may share an earlier layer's cache."""
    owners = model.kv_shape.layers
    n_counted = keys.integer("block_count", 1, MAX_LAYERS)
    heads = keys.per_layer("attention.head_count", n_counted, MAX_HEADS)
    shapes: list[AttentionShape | None] = []
    attending = iter([kv for kv in owners if kv.n_heads])
    for i, window in enumerate(windows):
        if model.is_recurrent:
            if not has_attention(model.layers[i].tensors):
                shapes.append(None)
                continue
            kv = next(attending)
        else:
            kv = owners[min(i, len(owners) - 1)]
        if not heads[i] or not kv.n_heads:
            shapes.append(None)
            continue
        # Compressed values (MLA) are a part of the cached keys, but multiplied like any values.
        length = kv.value_length or keys.integer(
            "attention.value_length", 1, MAX_HEAD_SIZE, kv.key_length
        )
        shapes.append(
            AttentionShape(
                n_heads=heads[i],
                n_kv_heads=kv.n_heads,
                key_length=kv.key_length,
                value_length=length,
                kv_bytes_per_token=KvShape((kv,)).bytes_per_token(
                    type_k, type_v, flash_attention=True
                ),
                kv_format=CACHE_TYPES[type_k],
                window=window,
                owns_kv=model.is_recurrent or i < len(owners),
            )
        )
    return tuple(shapes)


def _windows(model: GgufModel, keys: Keys) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """Return (window of each layer, notes on assumptions)."""
    n_layers, size = model.n_layers, model.sliding_window
    if size is None:
        return (None,) * n_layers, ()
    key = "attention.sliding_window_pattern"
    if model.index.metadata.array_length(keys.full(key)) is not None:
        n_counted = keys.integer("block_count", 1, MAX_LAYERS)
        flags = keys.per_layer(key, n_counted, 1)[:n_layers]
        return tuple(size if flag else None for flag in flags), ()
    period = keys.integer(key, 1, MAX_CONTEXT, _FULL_LAYER_PERIOD.get(model.architecture, 1))
    if period == 1:
        note = f"a sliding window of {size} tokens is named but not for which layers: not counted"
        return (None,) * n_layers, (note,)
    return tuple(size if i % period < period - 1 else None for i in range(n_layers)), ()
