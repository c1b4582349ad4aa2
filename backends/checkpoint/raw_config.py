"""Checks of the values of a config.json before transformers builds anything from them.

transformers reports a wrong value in several lines, late or not at all; an absurd one costs minutes
or more memory than there is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from backends.checkpoint.kinds import config_parts, read_raw
from backends.contract.backend import UnsupportedModel
from offload.formats.tensors import CheckpointError

_REQUIRED = {"hidden_size": 2**20, "vocab_size": 2**24, "num_attention_heads": 2**14}
_OPTIONAL = {
    "head_dim": 2**16,
    "intermediate_size": 2**24,
    "num_key_value_heads": 2**14,
    "max_position_embeddings": 2**40,
}
"""Values that may be null, and their upper bounds, which are far above any model."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_COUNT = re.compile(
    r"(^n|num|layer|block|depth|expert|head|group|stage|loop|codebook|level|step)s?(_|$)"
)
"""Names of counts from which families build modules or lists: a count of 10^9 would use all memory
while the config is read."""
_NO_COUNT = re.compile(
    r"vocab|position|token|size|dim|length|embd|inner|ctx|rank|param|bucket|sample|freq|seed|dtype"
)
_MAX_COUNT = 2**14
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of layer counts, which are compared with the checkpoint (layer_count.py)."""
_REMEDY = "fix the config.json, or download the checkpoint again"
# RoPE types that can be computed, and names that other versions of transformers wrote.
_ROPE_TYPES = {*ROPE_INIT_FUNCTIONS, "default", "su", "mrope"}


def refuse_nonsense(directory: Path) -> None:
    """Raise CheckpointError or UnsupportedModel for values from which no model can be built.

    A file that is missing or no JSON object is ignored: reading the config reports it.
    """
    config = read_raw(directory)
    path = directory / "config.json"
    kind = config.get("model_type")
    if not isinstance(kind, str | None):
        raise CheckpointError(
            f"{path}: model_type is {json.dumps(kind)[:60]}, must be a string: {_REMEDY}"
        )
    _check_weights_file(config, directory)
    _check_numbers(config, path)
    for part in config_parts(config):
        _check_sizes(part, path)
        _check_rope(part, path)
        _check_dtype(part, path)


def _check_dtype(part: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for a name that is no type of numbers."""
    import torch

    for name in ("dtype", "torch_dtype"):
        value = part.get(name)
        if not isinstance(value, str) or value == "auto":
            continue
        if not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
            raise CheckpointError(
                f"{path}: {name} is {json.dumps(value)[:60]}, must be float32, bfloat16, float16 "
                f"or another type of torch: {_REMEDY}"
            )


def _check_numbers(value: Any, path: Path, name: str = "", depth: int = 0) -> None:
    """Raise CheckpointError for an absurd count or a NaN in any part of a config."""
    if isinstance(value, dict):
        for key, item in value.items():
            if depth or key not in _LAYER_COUNTS:
                _check_numbers(item, path, key, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_numbers(item, path, name, depth + 1)
    elif isinstance(value, float) and math.isnan(value):
        raise CheckpointError(f"{path}: {name} is NaN, must be a number: {_REMEDY}")
    elif isinstance(value, int | float) and value > _MAX_COUNT and _is_count(name):
        raise CheckpointError(
            f"{path}: {name} is {json.dumps(value)[:60]}, at most {_MAX_COUNT} are accepted: "
            f"{_REMEDY}"
        )


def _check_weights_file(config: Mapping[str, Any], directory: Path) -> None:
    """Raise UnsupportedModel if the config names another weights file than specdec reads."""
    named = config.get("transformers_weights")
    usual = next((name for name in _WEIGHTS if (directory / name).exists()), None)
    if named is not None and named != usual:
        raise UnsupportedModel(
            f"{directory}/config.json takes its weights from {json.dumps(named)[:60]} "
            f"(transformers_weights), and specdec reads {' or '.join(_WEIGHTS)}: rename that "
            "file in a folder of its own, and remove the entry"
        )


def _is_count(name: str) -> bool:
    return _COUNT.search(name) is not None and _NO_COUNT.search(name) is None


def _check_sizes(config: Mapping[str, Any], path: Path) -> None:
    for name, limit in {**_REQUIRED, **_OPTIONAL, "num_hidden_layers": 2**62}.items():
        value = config.get(name, 1)
        # Some families list one value for each layer.
        if isinstance(value, list) or (value is None and name in _OPTIONAL):
            continue
        if type(value) is not int or not 1 <= value <= limit:
            bounds = "of at least 1" if limit == 2**62 else f"from 1 to {limit}"
            raise CheckpointError(
                f"{path}: {name} is {json.dumps(value)[:60]}, must be a whole number {bounds}: "
                f"{_REMEDY}"
            )


def _check_rope(config: Mapping[str, Any], path: Path) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        table = config.get(key)
        if not isinstance(table, dict):
            continue
        for rope in (table, *table.values()):  # some families have one for each type of layer
            kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
            if kind is not None and (not isinstance(kind, str) or kind not in _ROPE_TYPES):
                raise UnsupportedModel(
                    f"{path}: rope_type {json.dumps(kind)[:60]} is not known, only "
                    f"{', '.join(sorted(_ROPE_TYPES))}: {_REMEDY}"
                )
