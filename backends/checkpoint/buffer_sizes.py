"""Check of the sizes of buffers that a model computes while it is built, such as position sines.

Parameters take no memory on the meta device. Buffers are real, and their size comes from the
config: an absurd value would take more memory or time than there is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.architecture import language_config, new_model
from offload.formats.tensors import CheckpointError
from offload.units import GIB, format_bytes

_MAX_BYTES = GIB
"""Maximum size of all buffers; the largest known are masks and sines of some 10 MB a layer."""
_USUAL_VALUE = 2**14
"""Limit up to which no buffer takes long to build, so the model need not be built twice."""


def refuse_absurd_buffers(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Raise CheckpointError if a model's buffers are larger than any memory plan allows.

    Buffers are counted on the meta device, for one layer: the others are like it.
    """
    largest = max(_values(config.to_dict()), default=0)
    if largest <= _USUAL_VALUE:
        return
    model, n_layers = _one_layer(config, dtype), int(language_config(config).num_hidden_layers)
    outside, inside = 0, 0
    for name, buffer in model.named_buffers():
        is_of_layer = any(part.isdigit() for part in name.split("."))
        outside, inside = (
            outside + buffer.nbytes * (not is_of_layer),
            inside + buffer.nbytes * is_of_layer,
        )
    n_bytes = outside + inside * n_layers
    if n_bytes > _MAX_BYTES:
        raise CheckpointError(
            f"the {config.model_type} config asks for tables of {format_bytes(n_bytes)} beside the "
            f"weights, and {format_bytes(_MAX_BYTES)} are accepted; its largest number is "
            f"{largest}: fix the config.json, or download the checkpoint again"
        )


def _one_layer(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the meta device with one decoder layer; with all layers if that fails, so
    that their buffers count several times."""
    shallow = copy.deepcopy(config)
    with torch.device("meta"):
        try:
            language_config(shallow).num_hidden_layers = 1
            return new_model(shallow, dtype=dtype)
        except Exception:  # lists with a value per layer that no longer fit
            return new_model(copy.deepcopy(config), dtype=dtype)


def _values(value: Any) -> Iterator[int]:
    """Yield all whole numbers of a config, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _values(item)
    elif type(value) is int:
        yield value
