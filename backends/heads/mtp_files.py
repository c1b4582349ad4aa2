"""Folders with an MTP head alone, as `specdec train-draft` writes them.

`config.json` is that of the target's language model, with the class MTP_CLASS. The tensors have the
names of Qwen3.5's checkpoints, whatever the family:

    mtp.pre_fc_norm_embedding.*   norm of the tokens' embeddings
    mtp.pre_fc_norm_hidden.*      norm of the hidden states
    mtp.fc.weight                 [hidden, 2 * hidden]: both side by side to the layer's input
    mtp.layers.0.*                one decoder layer of the family
    mtp.norm.*                    final norm
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from backends.checkpoint.kinds import read_raw
from backends.contract.backend import UnsupportedModel

MTP_CLASS = "MtpHead"
_OWN_TENSORS = re.compile(r"(?:^|\.)mtp\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_COMPARED = ("model_type", "hidden_size", "vocab_size")


def mtp_tensors(names: Iterable[str], n_layers: int) -> list[str]:
    """Return the names of an MTP head's tensors in a target's checkpoint: mtp.*, or those of a
    layer after the last one, which transformers leaves out of the model.

    n_layers: decoder layers of the model.
    """

    def is_own(name: str) -> bool:
        layer = _LAYER.search(name)
        is_after = layer is not None and int(layer[1]) == n_layers
        return is_after or _OWN_TENSORS.search(name) is not None

    return [name for name in names if is_own(name)]


def check_fits(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a head of another target than that of this config."""
    own = read_raw(folder)
    for name in _COMPARED:
        if own.get(name) != config.get(name):
            raise UnsupportedModel(
                f"{folder} is an MTP head for a target with {name} {own.get(name)}, this one has "
                f"{config.get(name)}: name the head that was trained for this target"
            )


def mtp_names(layers: str) -> dict[str, str]:
    """Return beginnings of the head's parameters by those of its tensors.

    layers: name of the list of decoder layers, such as model.layers.
    """
    decoder = layers.rpartition(".")[0]
    return {
        "mtp.pre_fc_norm_embedding.": f"{decoder}.embed_tokens.enorm.",
        "mtp.pre_fc_norm_hidden.": f"{decoder}.embed_tokens.hnorm.",
        "mtp.fc.": f"{decoder}.embed_tokens.eh_proj.",
        "mtp.layers.": f"{layers}.",
        "mtp.norm.": f"{decoder}.norm.",
    }


def renamed(name: str, starts: Mapping[str, str]) -> str | None:
    """Return a name with its beginning replaced; None if `starts` has none for it."""
    for old, new in starts.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None
