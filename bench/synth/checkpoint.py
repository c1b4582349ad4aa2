"""Growth of a small checkpoint (Llama, Qwen3-MoE, Qwen3.5, NemotronH) to a large one's size.

The grown model computes the same function as the small one (`bench.synth.growth` has the maths), so
output and acceptance are the small model's while the cost of a pass is the large model's. So
measurements need no download of a large model.

Only one chunk of one tensor is in memory. The checkpoint is written to a hidden
folder beside its destination and renamed at the end (`offload.storage.unfinished`), so that an
error, a full disk or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from bench.synth.files import (
    check_folder,
    grown_config,
    model_card,
    write_json,
    write_side_files,
)
from bench.synth.gguf_file import reserve_blocks
from bench.synth.hybrid import tensor_plans
from bench.synth.layouts import LAYOUTS, StoredTensor, TensorLayout
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel
from bench.synth.tensors import TensorPlan
from bench.synth.weights import TensorMaker
from offload.storage.unfinished import unfinished
from offload.units import Progress

DEFAULT_SHARD_BYTES = 1_500_000_000
_HEADER_ALIGNMENT = 8  # safetensors pads its header to this many bytes


@dataclass(frozen=True)
class GrowReport:
    """Summary of a grown checkpoint."""

    path: Path  # the folder, or the GGUF file
    shape: LlamaShape
    n_parameters: int
    n_bytes: int  # of weights
    n_files: int


@dataclass(frozen=True)
class Shard:
    """Safetensors file of the grown checkpoint."""

    name: str
    plans: tuple[TensorPlan, ...]


def grow(
    source_dir: Path,
    out_dir: Path,
    shape: LlamaShape,
    *,
    vocab_size: int | None = None,
    dtype: str = "bf16",
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    source_name: str | None = None,
    progress: Progress | None = None,
    with_data: bool = True,
) -> GrowReport:
    """Write a checkpoint of `shape` that computes the same function as the one in `source_dir`.

    Args:
        source_dir: a Hugging Face checkpoint of a Llama, Qwen3-MoE, Qwen3.5 or dense NemotronH, in
            safetensors.
        out_dir: folder for the grown checkpoint; must be empty or absent unless `force`.
        shape: sizes of the grown model. Heads are re-cut to the source's head dimension. A tied
            shape stays untied if the source's head differs from its embedding.
        vocab_size: replaces the shape's vocabulary; ids beyond the source's are padding.
        dtype: one of `LAYOUTS`: "fp32" for exact comparisons of logits; "fp8" and "int4" round
            layers' weights.
        seed: seed of the random weights.
        force: replaces an existing checkpoint in `out_dir`.
        shard_bytes: maximum size of a file, unless one tensor is larger.
        source_name: name of the source in the model card; by default its folder.
        progress: called after each chunk.
        with_data: False leaves holes for the tensors, which suffices for planning.

    Raises:
        SynthError: the source is none of them or does not fit the shape, the disk lacks space,
            or `out_dir` is not empty.
    """
    if dtype not in LAYOUTS:
        raise SynthError(f"unknown dtype {dtype!r}; known: {', '.join(LAYOUTS)}")
    layout = LAYOUTS[dtype]
    out_dir = Path(out_dir).expanduser().absolute()
    source = SourceModel(Path(source_dir))
    grown = fit_shape(source, shape, vocab_size)
    if layout.scheme is not None and grown.experts is not None:
        raise SynthError(f"a mixture of experts is not grown in {dtype}: choose bf16 or fp32")
    plans = tensor_plans(source.shape, grown)
    shards = split_shards(plans, layout, shard_bytes)
    n_bytes = sum(map(layout.n_bytes, plans))
    with unfinished(out_dir) as partial:
        check_folder(out_dir, source.folder, n_bytes if with_data else 0, force)
        try:
            partial.mkdir(parents=True)
            maker = TensorMaker(source.read, layout.form_of, seed)
            write_shards(partial, shards, maker, layout, n_bytes, progress, with_data)
            card = model_card(source, grown, dtype, n_bytes, seed, source_name)
            config = grown_config(source, grown, dtype) | layout.config
            write_side_files(partial, source, config, card)
            replace_folder(partial, out_dir)
        except OSError as error:
            raise SynthError(f"cannot write {out_dir}: {error.strerror or error}") from error
    return GrowReport(out_dir, grown, grown.parameters, n_bytes, len(shards))


def fit_shape(source: SourceModel, shape: LlamaShape, vocab_size: int | None) -> LlamaShape:
    """Return the shape to write: head size, vocabulary and tying adapted to the source."""
    shape = shape.with_head_dim(source.shape.head_dim).with_routing_of(source.shape)
    return replace(
        shape,
        vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        tied=shape.tied and source.shape.tied,
        has_mtp_head=source.shape.has_mtp_head,
    )


def split_shards(plans: list[TensorPlan], layout: TensorLayout, shard_bytes: int) -> list[Shard]:
    """Split tensors, in their order, into files of at most `shard_bytes` (or one tensor)."""
    groups: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        n_bytes = layout.n_bytes(plan)
        if groups[-1] and size + n_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(plan)
        size += n_bytes
    names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
    if len(groups) == 1:
        names = ["model.safetensors"]
    return [Shard(name, tuple(group)) for name, group in zip(names, groups, strict=True)]


def write_shards(
    folder: Path,
    shards: list[Shard],
    maker: TensorMaker,
    layout: TensorLayout,
    n_bytes: int,
    progress: Progress | None = None,
    with_data: bool = True,
) -> None:
    """Write all shards and, if there are several, their index."""
    n_written = 0
    for shard in shards:
        header = shard_header(shard, layout)
        shard_bytes = len(header) + sum(map(layout.n_bytes, shard.plans))
        with open(folder / shard.name, "wb") as file:
            file.write(header)
            if not with_data:
                file.truncate(shard_bytes)
                continue
            reserve_blocks(file.fileno(), shard_bytes)
            for plan in shard.plans:
                for chunk in layout.chunks(plan, maker):
                    file.write(chunk)
                    n_written += chunk.nbytes
                    if progress is not None:
                        progress(n_written, n_bytes)
            file.flush()
            os.fsync(file.fileno())  # a full disk must be noticed here, not when reading
    if len(shards) > 1:
        names = {item.name: shard.name for shard in shards for item in _stored(shard, layout)}
        index = {"metadata": {"total_size": n_bytes}, "weight_map": names}
        write_json(folder / "model.safetensors.index.json", index)


def shard_header(shard: Shard, layout: TensorLayout) -> bytes:
    """Return the safetensors header: its length (8 bytes, little-endian), then JSON, padded."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for stored in _stored(shard, layout):
        end = offset + stored.n_bytes
        entries[stored.name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _stored(shard: Shard, layout: TensorLayout) -> Iterator[StoredTensor]:
    return chain.from_iterable(map(layout.stored, shard.plans))


def replace_folder(partial: Path, out_dir: Path) -> None:
    """Move a finished checkpoint to its place; an old one is removed only afterwards."""
    old = out_dir.with_name(f".{out_dir.name}.old-{os.getpid()}")
    if out_dir.exists():
        out_dir.rename(old)
    try:
        partial.rename(out_dir)
    except BaseException:
        if old.exists():
            old.rename(out_dir)
        raise
    if old.exists():
        old.rename(partial)  # removed by `unfinished`
