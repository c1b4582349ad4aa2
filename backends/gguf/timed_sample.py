"""A few layers of a GGUF model without its weights, as a file in memory.

Timing needs the model's layers as llama.cpp runs them, with attention, norms and all operators, but
not their values: a sparse file of zeros uses memory only where it is read. The vocabulary is cut to
a few tokens, because the head is timed separately.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.gguf.model import GgufModel
from offload.formats.tensors import TensorRecord
from offload.placement.plan import spread

if TYPE_CHECKING:
    from gguf import GGUFWriter

SAMPLED_ARCHITECTURES = frozenset("gemma gemma2 llama phi3 qwen2 qwen3".split())
"""Tested architectures whose layers are alike and do not depend on the layer count. For others
llama.cpp may end the process if its assumptions fail (layers that share their KV)."""
_VOCABULARY_TENSORS = ("token_embd.weight", "output.weight", "output.bias")
_N_TOKENS = 256
_LEFT_OUT = ("general.", "tokenizer.", "split.")
_VALUE_TYPES = {
    "u8": "UINT8",
    "i8": "INT8",
    "u16": "UINT16",
    "i16": "INT16",
    "u32": "UINT32",
    "i32": "INT32",
    "f32": "FLOAT32",
    "bool": "BOOL",
    "str": "STRING",
    "u64": "UINT64",
    "i64": "INT64",
    "f64": "FLOAT64",
}


def can_be_sampled(model: GgufModel) -> bool:
    """Return whether a few layers represent all. False for mixtures: values choose the experts, and
    zeros choose the same ones for all rows."""
    return model.architecture in SAMPLED_ARCHITECTURES and not model.n_experts


def spread_layers(model: GgufModel, n_bytes: int) -> tuple[int, ...]:
    """Choose evenly spaced layers of `n_bytes` together: number formats may differ between the
    first and the last."""
    sizes = [sum(record.n_bytes for record in layer.tensors) for layer in model.layers]
    n_sampled = max(1, -(-n_bytes * len(sizes) // sum(sizes)))
    return tuple(spread(min(n_sampled, len(sizes)), len(sizes)))


@contextmanager
def sample_file(model: GgufModel, layers: Sequence[int]) -> Iterator[Path]:
    """Create a model of these layers alone, all weights zero; deleted at the context's end."""
    descriptor = os.memfd_create("specdec-sample")
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        _write(model, layers, path)
        yield path
    finally:
        os.close(descriptor)


def _write(model: GgufModel, layers: Sequence[int], path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(None, model.architecture)
    _add_metadata(writer, model, layers)
    n_bytes = 0
    for tensor in _tensors(model, layers):
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=kind
        )
        n_bytes += tensor.n_bytes + -tensor.n_bytes % gguf.GGUF_DEFAULT_ALIGNMENT
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        file = writer.fout[0]
        file.truncate(file.tell() + -file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT + n_bytes)
    finally:
        writer.close()


def _add_metadata(writer: GGUFWriter, model: GgufModel, layers: Sequence[int]) -> None:
    """Add the metadata of the layers; arrays with a value per layer are cut to the sample."""
    from gguf import GGUFValueType

    n_tokens = min(_N_TOKENS, model.vocab_size)
    replaced = {
        f"{model.architecture}.block_count": len(layers),
        f"{model.architecture}.vocab_size": n_tokens,
        f"{model.architecture}.nextn_predict_layers": 0,
    }
    metadata = model.index.metadata
    for key in metadata:
        if key.startswith(_LEFT_OUT):
            continue
        kind, n_values = metadata.type_name(key), metadata.array_length(key)
        value: Any = replaced.get(key, metadata[key])
        if n_values is None:
            writer.add_key_value(key, value, GGUFValueType[_VALUE_TYPES[kind]])
            continue
        if n_values == model.n_layers:
            value = [value[i] for i in layers]
        inner = GGUFValueType[_VALUE_TYPES[kind.removeprefix("arr[").removesuffix("]")]]
        writer.add_key_value(key, value, GGUFValueType.ARRAY, inner)
    if f"{model.architecture}.vocab_size" not in metadata:
        writer.add_vocab_size(n_tokens)
    writer.add_tokenizer_model("no_vocab")


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    n_bytes: int


def _tensors(model: GgufModel, layers: Sequence[int]) -> Iterator[_Tensor]:
    for number, layer in enumerate(layers):
        for record in model.layers[layer].tensors:
            role = record.name.split(".", 2)[2]
            yield _Tensor(f"blk.{number}.{role}", record.shape, record.dtype, record.n_bytes)
    for record in model.non_layer_records:
        yield _cut(record) if record.name in _VOCABULARY_TENSORS else _whole(record)


def _whole(record: TensorRecord) -> _Tensor:
    return _Tensor(record.name, record.shape, record.dtype, record.n_bytes)


def _cut(record: TensorRecord) -> _Tensor:
    """Return the tensor with the rows of the first tokens only."""
    num_tokens = min(_N_TOKENS, record.shape[0])
    shape = (num_tokens, *record.shape[1:])
    return _Tensor(record.name, shape, record.dtype, record.n_bytes // record.shape[0] * num_tokens)
