"""Checkpoints whose config, index and files disagree about which tensors there are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from checkpoints import FAMILIES, MIXTURES
from safetensors.torch import save_file
from transformers import PreTrainedModel

PARTS = ("head", "embedding", "layer", "norm")
"""Parts of a model that a disagreement may be about."""


@dataclass(frozen=True)
class Disagreement:
    """Disagreements of one checkpoint.

    spelling : part -> how often the base model's prefix stands before the name, in each copy of
        the tensor; a second copy has other values. No entry: as transformers writes it.
    in_two_shards : parts of which an earlier shard holds a copy with other values.
    listed_elsewhere : parts that the index places in a wrong shard.
    unlisted : parts that the index does not name.
    """

    family: str = "llama"
    is_tied: bool = True
    head: str = "own"  # "none", "own", "same" as the embedding, "short" by a row
    has_embedding: bool = True
    lost: str = ""
    spelling: Mapping[str, tuple[int, ...]] | None = None
    n_shards: int = 1
    in_two_shards: tuple[str, ...] = ()
    listed_elsewhere: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    listed_nowhere: bool = False


class Writer:
    """Writes checkpoints of one family; its model is built once."""

    def __init__(self, family: str) -> None:
        config_name, values = (FAMILIES | MIXTURES)[family]
        kind = getattr(transformers, config_name)
        n_layers = kind.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        self.config = kind(**{**values, n_layers: 2})
        self.config.tie_word_embeddings = False
        model = transformers.AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        self.prefix = model.base_model_prefix
        self._random = torch.Generator().manual_seed(0)
        self.tensors = {name: self._values(tensor) for name, tensor in model.state_dict().items()}
        self.names = self._names(model)

    def _names(self, model: PreTrainedModel) -> dict[str, str]:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        modules = {module: name for name, module in model.named_modules()}
        layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
        layer = next(n for n, p in layers[1].named_parameters() if p.ndim == 2)
        norms = [n for n in self.tensors if n.endswith("weight") and self.tensors[n].ndim == 1]
        return {
            "head": f"{modules[head]}.weight",
            "embedding": f"{modules[embedding]}.weight",
            "layer": f"{modules[layers]}.1.{layer}",
            "norm": norms[-1],
        }

    def _values(self, like: torch.Tensor) -> torch.Tensor:
        values = torch.empty(like.shape).normal_(0.0, 0.25, generator=self._random)
        return values + 1 if like.ndim == 1 else values

    def write(self, folder: Path, odd: Disagreement) -> Path:
        folder.mkdir()
        config = {**self.config.to_dict(), "tie_word_embeddings": odd.is_tied}
        (folder / "config.json").write_text(json.dumps(config))
        copies, part_of = self._copies(odd), {name: part for part, name in self.names.items()}
        shards: list[dict[str, torch.Tensor]] = [{} for _ in range(odd.n_shards)]
        listed = {"nowhere.weight": 0} if odd.listed_nowhere else {}
        for i, (spelled, (name, tensor)) in enumerate(sorted(copies.items())):
            place, part = i % odd.n_shards, part_of.get(name, "")
            if part in odd.in_two_shards and odd.n_shards > 1:
                place = max(place, 1)
                shards[place - 1][spelled] = self._values(tensor)
            shards[place][spelled] = tensor
            if part not in odd.unlisted:
                is_elsewhere = part in odd.listed_elsewhere
                listed[spelled] = (place + is_elsewhere) % odd.n_shards
        _write_shards(folder, shards, listed)
        return folder

    def _copies(self, odd: Disagreement) -> dict[str, tuple[str, torch.Tensor]]:
        """Return spelled name -> (name, values)."""
        tensors = dict(self.tensors)
        head, embedding = self.names["head"], self.names["embedding"]
        if odd.head == "same":
            tensors[head] = tensors[embedding].clone()
        elif odd.head == "short":
            tensors[head] = tensors[head][:-1].clone()
        elif odd.head == "none":
            del tensors[head]
        gone = [self.names[odd.lost]] if odd.lost else []
        gone += [] if odd.has_embedding else [embedding]
        spelling = {self.names.get(k, k): v for k, v in (odd.spelling or {}).items()}
        copies = {}
        for name, tensor in tensors.items():
            if name in gone:
                continue
            bare = name.removeprefix(f"{self.prefix}.")
            default = (1 if bare != name else 0,)
            for i, n in enumerate(spelling.get(name, spelling.get("all", default))):
                n_prefixes = max(0, n - (bare == name and "all" in spelling))
                values = self._values(tensor) if i else tensor
                copies[f"{self.prefix}." * n_prefixes + bare] = (name, values)
        return copies


def _write_shards(
    folder: Path, shards: list[dict[str, torch.Tensor]], listed: Mapping[str, int]
) -> None:
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    n = len(shards)
    names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {name: names[place] for name, place in listed.items()}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
