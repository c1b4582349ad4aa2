"""Do config.json and the checkpoint agree on the number of decoder layers?

A config that asks for more layers than there are would be built at full length before a tensor is
missed; one that asks for fewer would run, and give another model's text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from backends.checkpoint.kinds import read_raw
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError

_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
_PLAUSIBLE_LAYERS = 512
"""More than any model has; below, building the modules takes seconds at most."""


def refuse_absurd_count(directory: Path) -> None:
    """Raise CheckpointError for a count that would take minutes to build; reads config.json."""
    requested = _claimed_layers(read_raw(directory))
    if requested <= _PLAUSIBLE_LAYERS:
        return
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{directory}/config.json says {requested} layers; without weights at most "
            f"{_PLAUSIBLE_LAYERS} are accepted: mend the config.json"
        )
    pinned = _n_layers(WeightIndex.from_directory(directory))
    if requested > pinned:
        raise CheckpointError(
            f"{directory}/config.json says {requested} layers, the checkpoint holds {pinned}: "
            "the config is another model's, or the download is incomplete"
        )


def check_layers_used(
    model: PreTrainedModel, layers_name: str, n_layers: int, names: Iterable[str], directory: Path
) -> None:
    """Raise CheckpointError when the checkpoint holds decoder layers that would not run.

    Layers for the prediction of further tokens stand behind the decoder's in some checkpoints;
    their config or their class says so.

    Args:
        layers_name: the decoder's, as in "model.layers".
        names: of the checkpoint's tensors.
    """
    bare = layers_name.removeprefix(model.base_model_prefix + ".")
    known = [re.compile(p) for p in model._keys_to_ignore_on_load_unexpected or ()]
    extra = getattr(model.config, "num_nextn_predict_layers", None) or 0
    prefix = re.escape(model.base_model_prefix)
    ours = re.compile(rf"(?:{prefix}\.)*{re.escape(bare)}\.(\d+)\.")
    pinned = n_layers
    for name in names:
        match = ours.match(name)
        if match is not None and not any(pattern.search(name) for pattern in known):
            pinned = max(pinned, int(match.group(1)[:10]) + 1)
    if pinned > n_layers + extra:
        raise CheckpointError(
            f"{directory}: the checkpoint has {pinned} layers, the config asks for {n_layers}: "
            "take the config.json that belongs to these weights"
        )


def _claimed_layers(config: dict[str, Any]) -> int:
    places = (config, config.get("text_config"))
    values = (p[key] for p in places if isinstance(p, dict) for key in _COUNT_KEYS if key in p)
    return max((value for value in values if type(value) is int), default=0)


def _n_layers(names: Iterable[str]) -> int:
    result = (_LAYER.search(name) for name in names)
    # Ten digits are more than any file can hold, and bound the cost of reading a number.
    return max((int(m.group(1)[:10]) + 1 for m in result if m is not None), default=0)
