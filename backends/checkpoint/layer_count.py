"""Checks that config.json and the checkpoint agree on the number of decoder layers.

With too many layers in the config, the whole model would be built before a tensor is missing; with
too few, the model would run and generate wrong text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from backends.checkpoint.architecture import language_config
from backends.checkpoint.kinds import read_raw
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError

_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_PLAUSIBLE_LAYERS = 512
"""More layers than any model has; building this many modules takes seconds at most."""


def refuse_absurd_count(directory: Path) -> None:
    """Raise CheckpointError if config.json has a layer count that would take minutes to build."""
    n_claimed = _claimed_layers(read_raw(directory))
    if n_claimed <= _PLAUSIBLE_LAYERS:
        return
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{directory}/config.json says {n_claimed} layers; without weights at most "
            f"{_PLAUSIBLE_LAYERS} are accepted: fix the config.json"
        )
    n_stored = _n_layers(WeightIndex.from_directory(directory))
    if n_claimed > n_stored:
        raise CheckpointError(
            f"{directory}/config.json says {n_claimed} layers, the checkpoint holds {n_stored}: "
            "the config is another model's, or the download is incomplete"
        )


def check_layers_used(
    model: PreTrainedModel, layers_name: str, n_layers: int, names: Iterable[str], directory: Path
) -> None:
    """Raise CheckpointError if the checkpoint has decoder layers that would not run.

    In some checkpoints, layers for multi-token prediction follow the decoder's; their config or
    their class says so.

    Args:
        layers_name: name of the list of decoder layers, as in "model.layers".
        names: names of the checkpoint's tensors.
    """
    bare = layers_name.removeprefix(model.base_model_prefix + ".")
    known = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    extra = getattr(language_config(model.config), "num_nextn_predict_layers", None) or 0
    prefix = re.escape(model.base_model_prefix)
    ours = re.compile(rf"(?:{prefix}\.)*{re.escape(bare)}\.(\d+)\.")
    n_stored = n_layers
    for name in names:
        match = ours.match(name)
        if match is not None and not any(pattern.search(name) for pattern in known):
            n_stored = max(n_stored, int(match.group(1)[:10]) + 1)
    if n_stored > n_layers + extra:
        raise CheckpointError(
            f"{directory}: the checkpoint has {n_stored} layers, the config asks for {n_layers}: "
            "take the config.json that belongs to these weights"
        )


def _claimed_layers(config: dict[str, Any]) -> int:
    places = (config, config.get("text_config"))
    values = (p[key] for p in places if isinstance(p, dict) for key in _COUNT_KEYS if key in p)
    return max((value for value in values if type(value) is int), default=0)


def _n_layers(names: Iterable[str]) -> int:
    matches = (_LAYER.search(name) for name in names)
    # Ten digits are more than any file can have, and bound the cost of parsing a number.
    return max((int(m.group(1)[:10]) + 1 for m in matches if m is not None), default=0)
