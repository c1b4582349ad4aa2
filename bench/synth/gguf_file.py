"""Writer of a GGUF file of a Llama, Qwen3-MoE, Qwen3.5 or NemotronH: names, layout, header, data.

The `gguf` package writes the header; the data is written in chunks, so that memory does not grow
with the file.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.synth.hybrid import MTP_LAYER
from bench.synth.shapes import SynthError
from offload.distribution import install_command
from offload.units import Progress

if TYPE_CHECKING:
    from gguf import GGUFWriter

ALIGNMENT = 32
ARCHITECTURES = {
    "llama": "LLAMA",
    "qwen3_moe": "QWEN3MOE",
    "qwen3_5_text": "QWEN35",
    "qwen3_5_moe_text": "QWEN35MOE",
    "nemotron_h": "NEMOTRON_H",
    "nemotron_h_moe": "NEMOTRON_H_MOE",
}
"""Names in gguf.MODEL_ARCH, by a checkpoint's `model_type`; nemotron_h_moe is here alone."""
_MTP_NAMES = {
    "mtp.fc.weight": "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
"""llama.cpp's names of an MTP head's tensors outside of its layer, which comes after the last."""
_OTHER_NAMES = [
    (re.compile(pattern), other)
    for pattern, other in (
        (r"\.dt_bias$", ".dt_proj.bias"),
        (r"\.e_score_correction_bias$", ".e_score_correction.bias"),
        (r"^backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts."),
    )
]
"""Names of tensors in checkpoints, and those that the `gguf` package knows."""
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class GgufTensor:
    """Tensor to write: `chunks()` yields its bytes in order."""

    name: str
    shape: tuple[int, ...]  # row-major, as in the checkpoint
    ggml_type: str  # "F16", "Q4_0", ...
    n_bytes: int
    chunks: Callable[[], Iterable[memoryview]]


def gguf_name(name: str, model_type: str, n_layers: int) -> str:
    """Return llama.cpp's name of a checkpoint's tensor; for an expert's, that of all experts.

    Raises:
        SynthError: such a model has no such tensor.
    """
    if name in _MTP_NAMES:
        return f"blk.{n_layers}.nextn.{_MTP_NAMES[name]}.weight"
    if name.startswith(MTP_LAYER):
        name = name.replace(MTP_LAYER, f"model.layers.{n_layers}.")
        n_layers += 1
    known = _known_names(model_type, n_layers)
    for own, other in _OTHER_NAMES:
        name = own.sub(other, name)
    known_name = known.get_name(
        _ONE_EXPERT.sub(".experts.", name), try_suffixes=(".weight", ".bias")
    )
    if known_name is None:
        raise SynthError(f"tensor {name!r} is no part of a plain {model_type}")
    return known_name


@cache
def _known_names(model_type: str, n_layers: int) -> Any:
    gguf = import_gguf()
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[model_type]], n_layers)


def interleave_rotary(name: str, tensor: np.ndarray, n_heads: int, n_kv_heads: int) -> np.ndarray:
    """Reorder the rows of Q and K: llama.cpp rotates neighbours (2i, 2i+1) within a head.

    Hugging Face rotates (i, i + E/2), so row i of each half becomes rows 2i and 2i + 1; other
    tensors are returned as they are.
    """
    heads = {"q_proj.weight": n_heads, "k_proj.weight": n_kv_heads}.get(
        name.rpartition("self_attn.")[2]
    )
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    add_metadata: Callable[[GGUFWriter], None],
    tensors: Iterable[GgufTensor],
    progress: Progress | None = None,
    with_data: bool = True,
    model_type: str = "llama",
) -> None:
    """Write one GGUF file; the caller removes it if an error leaves it unfinished.

    Args:
        path: the file, replaced if it exists.
        add_metadata: adds everything but `general.architecture`.
        tensors: the tensors in the order of the file.
        progress: called after each chunk.
        with_data: False leaves a hole for the tensors, which suffices for planning.
        model_type: the checkpoint's, a key of `ARCHITECTURES`.
    """
    gguf = import_gguf()
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[model_type]]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer)
    tensors = list(tensors)
    for tensor in tensors:
        ggml_type = gguf.GGMLQuantizationType[tensor.ggml_type]
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=ggml_type
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        if with_data:
            _write_data(writer.fout[0], tensors, progress)
        else:
            _leave_hole(writer.fout[0], tensors)
    finally:
        writer.close()


def _write_data(file: Any, tensors: list[GgufTensor], progress: Progress | None) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))
    total = sum(tensor.n_bytes for tensor in tensors)
    file.flush()
    reserve_blocks(file.fileno(), file.tell() + _padded_bytes(tensors))
    n_written = 0
    for tensor in tensors:
        begin = n_written
        for chunk in tensor.chunks():
            file.write(chunk)
            n_written += chunk.nbytes
            if progress is not None:
                progress(n_written, total)
        if n_written - begin != tensor.n_bytes:
            raise AssertionError(f"{tensor.name}: {n_written - begin} of {tensor.n_bytes} bytes")
        file.write(bytes(-tensor.n_bytes % ALIGNMENT))
    file.flush()
    os.fsync(file.fileno())  # a full disk must be noticed here, not when reading


def _leave_hole(file: Any, tensors: list[GgufTensor]) -> None:
    begin = file.tell() + -file.tell() % ALIGNMENT
    file.truncate(begin + _padded_bytes(tensors))


def _padded_bytes(tensors: list[GgufTensor]) -> int:
    return sum(tensor.n_bytes + -tensor.n_bytes % ALIGNMENT for tensor in tensors)


def reserve_blocks(descriptor: int, n_bytes: int) -> None:
    """Reserve the file's blocks at once: contiguous, and a full disk is noticed early."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def import_gguf() -> Any:
    """Return the `gguf` package. Raises SynthError if it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise SynthError(
            f"writing GGUF needs the gguf package: {install_command('gguf')}"
        ) from error
    return gguf
