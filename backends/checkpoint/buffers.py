"""Buffers that a checkpoint stores beside parameters: score corrections of a router (DeepSeek-V3),
the scale of a layer (Gemma 4), constants of an activation (Apertus)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from backends.checkpoint.matching import TensorMatch
from backends.checkpoint.records import TORCH_DTYPES, check_record
from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord

_IN_FLOAT32 = "e_score_correction_bias"
"""Buffer that transformers keeps in float32, whatever dtype a model computes in."""


def fill_buffers(model: PreTrainedModel, match: TensorMatch, directory: Path) -> None:
    """Read the buffers that transformers would save, into a model on the meta device.

    Raises CheckpointError if one is missing: its initial values are not those of the checkpoint.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, buffer in model.state_dict().items():
        if name in parameters:
            continue
        record = match.find(name)
        if record is None or record.scheme:
            raise CheckpointError(
                f"{directory} lacks {name}: the download is incomplete or the config is another "
                "model's"
            )
        check_record(record, buffer.shape, record.name, directory)
        module, _, attribute = name.rpartition(".")
        dtype = torch.float32 if attribute == _IN_FLOAT32 else buffer.dtype
        model.get_submodule(module)._buffers[attribute] = _read(record).to(dtype)


def _read(record: TensorRecord) -> torch.Tensor:
    stored = bytearray(read_part(record.path, record.offset, record.n_bytes))
    values = torch.frombuffer(stored, dtype=torch.uint8)
    return values.view(TORCH_DTYPES[record.dtype]).view(record.shape)
