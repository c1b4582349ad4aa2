"""GGUF files written byte by byte, so that they can be wrong in any way."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from offload.formats.gguf_header import GGML_TYPES

CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8,
         "arr": 9, "u64": 10, "i64": 11, "f64": 12}  # fmt: skip
FORMATS = {"u8": "B", "i8": "b", "u16": "H", "i16": "h", "u32": "I", "i32": "i", "f32": "f",
           "bool": "?", "u64": "Q", "i64": "q", "f64": "d"}  # fmt: skip
TYPE_CODES = {kind.name: code for code, kind in GGML_TYPES.items()}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: str, item: Any) -> bytes:
    return string(item) if kind == "str" else struct.pack("<" + FORMATS[kind], item)


def pair(key: str | bytes, kind: str, item: Any) -> bytes:
    """Encode one key-value pair; `kind` is "u32", "str", ... or "[u32]" for an array."""
    if kind.startswith("["):
        kind = kind[1:-1]
        head = struct.pack("<IIQ", CODES["arr"], CODES[kind], len(item))
        return string(key) + head + b"".join(value(kind, x) for x in item)
    return string(key) + struct.pack("<I", CODES[kind]) + value(kind, item)


def raw_pair(key: str | bytes, code: int, payload: bytes = b"") -> bytes:
    return string(key) + struct.pack("<I", code) + payload


def raw_array(key: str, code: int, count: int, payload: bytes = b"") -> bytes:
    return raw_pair(key, CODES["arr"], struct.pack("<IQ", code, count) + payload)


def tensor(name: str | bytes, ne: Sequence[int], code: int, offset: int) -> bytes:
    """Encode a tensor's entry; `ne` has the contiguous dimension first."""
    sizes = b"".join(struct.pack("<Q", size % 2**64) for size in ne)
    return string(name) + struct.pack("<I", len(ne)) + sizes + struct.pack("<IQ", code, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
    alignment: int = 32,
) -> bytes:
    n_tensors = len(tensors) if n_tensors is None else n_tensors
    n_pairs = len(pairs) if n_pairs is None else n_pairs
    head = magic + struct.pack("<IQQ", version, n_tensors, n_pairs)
    head += b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def tensor_bytes(kind: str, shape: Sequence[int]) -> int:
    block = GGML_TYPES[TYPE_CODES[kind]]
    return prod(shape) // block.block_size * block.block_bytes


def make_file(
    metadata: Mapping[str, tuple[str, Any]],
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    *,
    alignment: int = 32,
    seed: int = 0,
) -> bytes:
    """Encode a valid file: key -> (type, value), tensor name -> (type, numpy shape).

    Tensor number n is filled with the byte n + seed (modulo 251).
    """
    entries, data = [], bytearray()
    for number, (name, (kind, shape)) in enumerate(tensors.items()):
        entries.append(tensor(name, tuple(reversed(shape)), TYPE_CODES[kind], len(data)))
        data += bytes([(number + seed) % 251]) * tensor_bytes(kind, shape)
        data += bytes(-len(data) % alignment)
    pairs = [pair(key, kind, item) for key, (kind, item) in metadata.items()]
    return gguf(pairs, entries, bytes(data), alignment=alignment)


# A model of two layers, complete enough for its properties to be read.
HIDDEN, VOCAB, HEADS = 64, 96, 4


def model_metadata(architecture: str = "llama", **changes: tuple[str, Any] | None) -> dict:
    """Key -> (type, value). `changes` by key without the architecture, "__" for "."; None drops.

    Example: model_metadata(block_count=("u32", 3), attention__head_count=None)
    """
    keys: dict[str, tuple[str, Any]] = {
        "block_count": ("u32", 2),
        "context_length": ("u32", 512),
        "embedding_length": ("u32", HIDDEN),
        "feed_forward_length": ("u32", 2 * HIDDEN),
        "attention.head_count": ("u32", HEADS),
        "attention.head_count_kv": ("u32", HEADS // 2),
        "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "rope.dimension_count": ("u32", HIDDEN // HEADS),
    }
    for key, change in changes.items():
        keys.pop(key.replace("__", "."), None)
        if change is not None:
            keys[key.replace("__", ".")] = change
    metadata = {"general.architecture": ("str", architecture)}
    metadata |= {f"{architecture}.{key}": item for key, item in keys.items()}
    metadata["tokenizer.ggml.model"] = ("str", "gpt2")
    metadata["tokenizer.ggml.tokens"] = ("[str]", [f"t{i}" for i in range(VOCAB)])
    return metadata


def layer_tensors(layer: int, kind: str = "F32") -> dict[str, tuple[str, tuple[int, ...]]]:
    shapes = {
        "attn_norm": (HIDDEN,),
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (HIDDEN // 2, HIDDEN),
        "attn_v": (HIDDEN // 2, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_norm": (HIDDEN,),
        "ffn_gate": (2 * HIDDEN, HIDDEN),
        "ffn_up": (2 * HIDDEN, HIDDEN),
        "ffn_down": (HIDDEN, 2 * HIDDEN),
    }
    return {
        f"blk.{layer}.{name}.weight": ("F32" if name.endswith("norm") else kind, shape)
        for name, shape in shapes.items()
    }


def model_tensors(
    n_layers: int = 2, kind: str = "F32", *, tied: bool = False
) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": (kind, (VOCAB, HIDDEN))}
    for layer in range(n_layers):
        tensors |= layer_tensors(layer, kind)
    tensors["output_norm.weight"] = ("F32", (HIDDEN,))
    if not tied:
        tensors["output.weight"] = (kind, (VOCAB, HIDDEN))
    return tensors


def write_model(
    path: Path,
    metadata: Mapping[str, tuple[str, Any]] | None = None,
    tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None,
) -> Path:
    path.write_bytes(make_file(metadata or model_metadata(), tensors or model_tensors()))
    return path


def write_splits(
    folder: Path,
    metadata: Mapping[str, tuple[str, Any]],
    parts: Sequence[Mapping[str, tuple[str, Sequence[int]]]],
    *,
    name: str = "model",
) -> list[Path]:
    """Write the splits of a model; only the first has its metadata."""
    n_tensors = sum(len(part) for part in parts)
    paths = []
    for number, part in enumerate(parts):
        keys = dict(metadata) if number == 0 else {}
        keys["split.no"] = ("u16", number)
        keys["split.count"] = ("u16", len(parts))
        keys["split.tensors.count"] = ("i32", n_tensors)
        path = folder / f"{name}-{number + 1:05d}-of-{len(parts):05d}.gguf"
        path.write_bytes(make_file(keys, part, seed=100 * number))
        paths.append(path)
    return paths
