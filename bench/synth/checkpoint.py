"""Grows a small checkpoint (Llama, Qwen3-MoE) to the bytes, FLOPs and shapes of a large one.

The grown model computes the same function as the small one (`bench.synth.growth` has the maths), so
text and acceptance are the small model's while the cost of a pass is the large model's. That
is what makes honest measurements possible where no large model can be downloaded.

Nothing is held in memory but one chunk of one tensor. The checkpoint is written to a hidden
folder beside its destination and renamed at the end (`offload.storage.unfinished`), so that an
error, a full disk or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.synth.files import (
    check_folder,
    grown_config,
    model_card,
    write_json,
    write_side_files,
)
from bench.synth.formats import BF16, F32, WeightFormat
from bench.synth.growth import GrowthPlanner
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel
from bench.synth.tensors import TensorPlan
from bench.synth.weights import TensorMaker
from offload.storage.unfinished import unfinished
from offload.units import Progress
from specdec.pair.gguf_file import reserve_blocks

DEFAULT_SHARD_BYTES = 1_500_000_000
_HEADER_ALIGNMENT = 8  # safetensors pads its header to this many bytes
FORMATS = {"bf16": BF16, "fp32": F32}


@dataclass(frozen=True)
class GrowReport:
    """What was written."""

    path: Path  # the folder, or the GGUF file
    shape: LlamaShape
    n_parameters: int
    n_bytes: int  # of weights
    n_files: int


@dataclass(frozen=True)
class Shard:
    """One safetensors file of the grown checkpoint."""

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
    """Writes a checkpoint of `shape` that computes the same function as the one in `source_dir`.

    Args:
        source_dir: a Hugging Face checkpoint of a Llama or a Qwen3-MoE, in safetensors.
        out_dir: where the grown checkpoint goes; must be empty or absent unless `force`.
        shape: the wanted sizes. Heads are re-cut to the source's head dimension. A tied shape
            stays untied if the source's head differs from its embedding.
        vocab_size: replaces the shape's vocabulary; ids beyond the source's are padding.
        dtype: "bf16", or "fp32" where logits are to be compared exactly.
        seed: of the random weights.
        force: replaces an existing checkpoint in `out_dir`.
        shard_bytes: a new file begins where the present one would exceed this.
        source_name: how the model card calls the source; by default its folder.
        progress: called after each chunk.
        with_data: False leaves holes for the tensors: enough to plan on, and no space on disk.

    Raises:
        SynthError: the source is neither of them, does not fit the shape, the disk lacks room, or
            `out_dir` is not empty.
    """
    if dtype not in FORMATS:
        raise SynthError(f"unknown dtype {dtype!r}; known: {', '.join(FORMATS)}")
    form = FORMATS[dtype]
    out_dir = Path(out_dir).expanduser().absolute()
    source = SourceModel(Path(source_dir))
    grown = fit_shape(source, shape, vocab_size)
    shards = split_shards(
        GrowthPlanner(source.shape, grown).tensors(), form.block_bytes, shard_bytes
    )
    n_bytes = form.n_bytes(grown.parameters)
    with unfinished(out_dir) as partial:
        check_folder(out_dir, source.folder, n_bytes if with_data else 0, force)
        try:
            partial.mkdir(parents=True)
            maker = TensorMaker(source.read, lambda plan: form, seed)
            write_shards(partial, shards, maker, form, n_bytes, progress, with_data)
            card = model_card(source, grown, dtype, n_bytes, seed, source_name)
            write_side_files(partial, source, grown_config(source, grown, dtype), card)
            _replace_folder(partial, out_dir)
        except OSError as error:
            raise SynthError(f"cannot write {out_dir}: {error.strerror or error}") from error
    return GrowReport(out_dir, grown, grown.parameters, n_bytes, len(shards))


def fit_shape(source: SourceModel, shape: LlamaShape, vocab_size: int | None) -> LlamaShape:
    """The shape that will be written: head size, vocabulary and tying adapted to the source."""
    shape = shape.with_head_dim(source.shape.head_dim).with_routing_of(source.shape)
    return replace(
        shape,
        vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        tied=shape.tied and source.shape.tied,
    )


def split_shards(plans: list[TensorPlan], bytes_per_weight: int, shard_bytes: int) -> list[Shard]:
    """Splits tensors, in their order, into files of at most `shard_bytes` (or one tensor)."""
    groups: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        n_bytes = plan.n_weights * bytes_per_weight
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
    form: WeightFormat,
    n_bytes: int,
    progress: Progress | None = None,
    with_data: bool = True,
) -> None:
    """Writes all shards and, if there are several, their index."""
    n_written = 0
    for shard in shards:
        header = shard_header(shard, form)
        shard_bytes = len(header) + _shard_bytes(shard, form)
        with open(folder / shard.name, "wb") as file:
            file.write(header)
            if not with_data:
                file.truncate(shard_bytes)
                continue
            reserve_blocks(file.fileno(), shard_bytes)
            for plan in shard.plans:
                for chunk in maker.chunks(plan):
                    file.write(chunk)
                    n_written += chunk.nbytes
                    if progress is not None:
                        progress(n_written, n_bytes)
            file.flush()
            os.fsync(file.fileno())  # a full disk must be noticed here, not when reading
    if len(shards) > 1:
        names = {plan.name: shard.name for shard in shards for plan in shard.plans}
        index = {"metadata": {"total_size": n_bytes}, "weight_map": names}
        write_json(folder / "model.safetensors.index.json", index)


def shard_header(shard: Shard, form: WeightFormat) -> bytes:
    """The safetensors header: its length (8 bytes, little-endian), then JSON, padded."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for plan in shard.plans:
        end = offset + form.n_bytes(plan.n_weights)
        entries[plan.name] = {
            "dtype": form.name,
            "shape": list(plan.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _shard_bytes(shard: Shard, form: WeightFormat) -> int:
    return sum(form.n_bytes(plan.n_weights) for plan in shard.plans)


def _replace_folder(partial: Path, out_dir: Path) -> None:
    """Moves a finished checkpoint to its place; an old one goes only when the new one is there."""
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
        old.rename(partial)  # to be removed like one that was not finished
