"""The embedded pair as GGUF files, written from its safetensors when they are first asked for.

They lie in the cache folder under a name that contains a digest of what they were made from, so a
retrained pair is exported anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import TensorRecord
from offload.process.remembered import cache_folder
from specdec.pair import GGUF_SUFFIX, PAIR_NAMES, PAIR_PREFIX, pair_path
from specdec.pair.float_weights import read_float32
from specdec.pair.gguf_file import (
    ARCHITECTURES,
    EXPERTS,
    ROUTER,
    GgufExportError,
    GgufTensor,
    gguf_name,
    interleave_rotary,
    natural_order,
    write_gguf,
)
from specdec.pair.gguf_metadata import add_model, add_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

PAIR_GGUF_NAMES = tuple(name + GGUF_SUFFIX for name in PAIR_NAMES)
_FORMAT = b"1"  # raise it when the exported bytes change
_SOURCES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


def pair_gguf_path(name: str) -> Path:
    """Returns the file of an embedded model as GGUF in F16, writing it if it is not there.

    Args:
        name: `pair:target.gguf`, `pair:draft.gguf` or `pair:moe.gguf`.

    Raises:
        ValueError: the name is not one of `PAIR_GGUF_NAMES`.
        FileNotFoundError: the package was installed without its model files.
        GgufExportError: the gguf package is missing, or the cache folder cannot be written.
    """
    if name not in PAIR_GGUF_NAMES:
        raise ValueError(f"unknown embedded model {name!r}; known: {', '.join(PAIR_GGUF_NAMES)}")
    model = name.removesuffix(GGUF_SUFFIX)
    folder = pair_path(model)
    path = cache_folder() / f"{model.removeprefix(PAIR_PREFIX)}-{_digest(folder)}{GGUF_SUFFIX}"
    if not path.is_file():
        try:
            _export_atomically(folder, path, model)
        except OSError as error:
            raise GgufExportError(
                f"cannot write {path}: {error.strerror or error}; "
                "set XDG_CACHE_HOME to a folder that can be written"
            ) from error
    return path


def export_f16(folder: Path, path: Path, name: str) -> None:
    """Writes a Llama or a Qwen3-MoE as GGUF: matrices in F16, norms and routers in F32."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    is_llama = config["model_type"] == "llama"  # of which llama.cpp rotates neighbours
    heads = (int(config["num_attention_heads"]), int(config["num_key_value_heads"]))

    def add_metadata(writer: GGUFWriter) -> None:
        add_model(writer, config, name=name, file_type="MOSTLY_F16")
        add_tokenizer(writer, folder, config["vocab_size"])

    same: dict[str, list[TensorRecord]] = {}
    for record in WeightIndex.from_directory(folder).values():
        new_name = gguf_name(record.name)
        if new_name is None or (config.get("tie_word_embeddings") and new_name == "output.weight"):
            continue
        same.setdefault(new_name, []).append(record)
    tensors = [_tensor(name, parts, heads if is_llama else None) for name, parts in same.items()]
    write_gguf(path, add_metadata, tensors, architecture=ARCHITECTURES[config["model_type"]])


def _tensor(name: str, parts: list[TensorRecord], heads: tuple[int, int] | None) -> GgufTensor:
    """parts: one, or a matrix of each expert.

    heads: of queries, and of keys and values, where neighbours of their rows are to be rotated.
    """
    parts.sort(key=lambda record: natural_order(record.name))
    is_float = len(parts[0].shape) == 1 or name.endswith(ROUTER)
    dtype = np.dtype(np.float32 if is_float else np.float16)

    def chunks() -> Iterator[memoryview]:
        for record in parts:
            weights = read_float32(record)
            if heads is not None:
                weights = interleave_rotary(record.name, weights, *heads)
            with np.errstate(over="ignore"):
                values = np.ascontiguousarray(weights, dtype=dtype)
            if not np.isfinite(values).all():
                raise GgufExportError(f"{record.name} has weights that F16 cannot hold")
            yield values.data.cast("B")

    n_bytes = sum(int(np.prod(record.shape)) for record in parts) * dtype.itemsize
    shape = parts[0].shape if EXPERTS not in name else (len(parts), *parts[0].shape)
    return GgufTensor(name, shape, "F32" if is_float else "F16", n_bytes, chunks)


def _export_atomically(folder: Path, path: Path, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        export_f16(folder, partial, name)
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _digest(folder: Path) -> str:
    """Of everything that the exported file depends on."""
    digest = hashlib.sha256(_FORMAT)
    for name in _SOURCES:
        data = (folder / name).read_bytes()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]
