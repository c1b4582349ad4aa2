"""Outline of a checkpoint of which there is a config.json alone."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch

from backends.checkpoint.config import config_faults, load_config
from backends.checkpoint.quantised import quantisation_of
from backends.checkpoint.records import TORCH_DTYPES
from backends.checkpoint.skeleton import build_model
from backends.contract.backend import UnsupportedModel
from offload.formats.outline import write_outline

_ALIGNMENT = 64
"""As safetensors' own writer aligns the data: misaligned tensors would be planned as copies."""


def write_config_outline(directory: Path) -> tuple[int, str]:
    """Write the outline of model.safetensors beside a config.json: the tensors of the model that
    transformers would build, tied ones once.

    Returns (its bytes, its number format: the config's dtype, BF16 if it names none).

    Raises CheckpointError and UnsupportedModel: no such model can be built, or a quantised one,
    whose stored tensors the config does not tell.
    """
    config = load_config(directory)
    if quantisation_of(config) is not None:
        raise UnsupportedModel(
            f"{directory.name} has a config.json of quantised weights and no weights: their sizes "
            "are in the headers, so name the model on the hub (user/repo), or one in bf16"
        )
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    with config_faults(directory):
        named = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        dtype: torch.dtype = named if named in names else torch.bfloat16
        model = build_model(config, dtype)
    table, position = {}, 0
    tied = set(model.all_tied_weights_keys)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        n_bytes = math.prod(tensor.shape) * dtype.itemsize
        table[name] = {
            "dtype": names[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + n_bytes],
        }
        position += n_bytes
    text = json.dumps(table).encode()
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    write_outline(directory / "model.safetensors", header, len(header) + position)
    return position, names[dtype]
