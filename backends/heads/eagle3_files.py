"""Tensors of an EAGLE-3 head, under the same names from safetensors and from GGUF files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from backends.contract.backend import UnsupportedModel
from backends.heads.eagle3_config import Eagle3Config, gguf_config, read_config
from backends.heads.gguf_tensors import decoded_records, head_dtype, read_numbers
from offload.formats.checkpoint import WeightIndex
from offload.formats.gguf_index import GgufIndex
from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorIndex, TensorRecord

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
_TARGET_IDS, _ROPE_FACTORS = "d2t", "rope_freqs.weight"
_UNUSED = re.compile(r"t2d$|(.*\.)?rotary_emb\.inv_freq$")
"""Tensors that follow from other ones."""
_LAYER = re.compile(r"(midlayer|layers\.0)\.")
_GGUF_NAMES = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": "norm.weight",
    "output.weight": HEAD,
    "blk.0.attn_norm.weight": "layers.0.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "layers.0.hidden_norm.weight",
    "blk.0.attn_q.weight": "layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "layers.0.mlp.down_proj.weight",
}
"""Names of llama.cpp's architecture eagle3 (src/models/eagle3.cpp)."""


@dataclass(frozen=True)
class Eagle3Files:
    """A head in its files."""

    config: Eagle3Config
    index: TensorIndex
    dtype: torch.dtype
    """Number format that it is computed in."""
    records: Mapping[str, TensorRecord]
    """Tensors by their names in speculators."""
    target_ids: torch.Tensor | None
    """Token of the target for each one of the head, int64 [draft vocabulary]; None: the same."""
    rope_factors: torch.Tensor | None = None
    """Divisors of RoPE's frequencies, float32 [head_dim / 2]."""
    stored: Mapping[str, TensorRecord] | None = None
    """Tensors of a GGUF file, by the same names, from which `records` are decoded."""


def open_safetensors(directory: Path, dtype: torch.dtype | None) -> Eagle3Files:
    """Index the head in a folder; dtype: number format to compute it in, None: its own.

    Raises CheckpointError, UnsupportedModel.
    """
    config, index = read_config(directory), WeightIndex.from_directory(directory)
    records, target_ids = {}, None
    for name, record in index.items():
        known = _LAYER.sub("layers.0.", name.removeprefix("model."), count=1)
        if known == _TARGET_IDS:
            # Each is stored as the distance of the two ids.
            distances = read_integers(record)
            target_ids = distances + torch.arange(len(distances))
        elif not _UNUSED.match(known):
            records[known] = record
    _check_ids(directory, config, target_ids)
    return Eagle3Files(config, index, dtype or head_dtype(records), records, target_ids)


def open_gguf(path: Path, dtype: torch.dtype | None) -> Eagle3Files:
    """Index the head in a GGUF file; dtype: number format to decode its tensors to, None: float32
    if it has that, else bfloat16.

    Raises CheckpointError, UnsupportedModel.
    """
    index = GgufIndex.from_path(path)
    config = gguf_config(path, index.metadata)
    stored, target_ids, factors = {}, None, None
    for name, record in index.items():
        if name == _TARGET_IDS:
            target_ids = read_integers(record)
        elif name in (_ROPE_FACTORS, f"blk.0.{_ROPE_FACTORS}"):
            factors = read_numbers(record)
        else:
            stored[_GGUF_NAMES.get(name, name)] = record
    _check_ids(path, config, target_ids)
    n_frequencies = config.layer.head_dim // 2
    if factors is not None and factors.shape != (n_frequencies,):
        raise CheckpointError(
            f"{path} has RoPE factors of the shape {tuple(factors.shape)}, must be "
            f"({n_frequencies},): convert the head again"
        )
    dtype = dtype or head_dtype(stored)
    records = decoded_records(stored, dtype)
    return Eagle3Files(config, index, dtype, records, target_ids, factors, stored)


def read_integers(record: TensorRecord) -> torch.Tensor:
    """Read the ids in a tensor, int64 [n]. Raises UnsupportedModel, CheckpointError."""
    if record.dtype not in ("I64", "I32"):
        raise UnsupportedModel(
            f"{record.path} has {record.name} of type {record.dtype}, must be I64: download the "
            "head again"
        )
    stored = read_part(record.path, record.offset, record.n_bytes)
    if len(stored) < record.n_bytes:
        raise CheckpointError(f"{record.path} ends within {record.name}: download the head again")
    numbers = np.frombuffer(stored, dtype=np.int64 if record.dtype == "I64" else np.int32)
    return torch.from_numpy(numbers.astype(np.int64))  # one dimension, whatever the file has


def _check_ids(path: Path, config: Eagle3Config, target_ids: torch.Tensor | None) -> None:
    if target_ids is None:
        return
    n_tokens, ids = config.layer.vocab_size, set(target_ids.flatten().tolist())
    if not ids or min(ids) < 0 or max(ids) >= n_tokens or len(ids) < target_ids.numel():
        shown = f"{min(ids)} to {max(ids)}" if ids else "no tokens"
        raise CheckpointError(
            f"{path} maps its tokens (d2t) to {shown}, must be different ids below {n_tokens}: "
            "download the head again"
        )
