"""Growth of a draft head for a grown target: its proposals stay those of the small target's head.

A head reads hidden states of its target, which are the small one's in the first d of D dimensions
and zeros in the others (bench/synth/growth.py). So every axis of a head's tensors is mapped by its
kind, and what is new multiplies zeros or writes none:

    hidden d -> D, also side by side (fc [d, 3 d] -> [D, 3 D]); heads and neurons as in a layer

A head's layers get the heads and neurons of the grown target's layers, as those of large models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.synth.files import grown_config, write_json
from bench.synth.growth import layer_places, map_heads
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.source import SourceModel, read_json

_LAYER_IDS = ("target_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Keys of a head's config that name layers of the target, at any depth."""
_STD = 0.02


class Segment(NamedTuple):
    """Part of an axis that comes from the small head."""

    small: int
    grown: int
    length: int


class Axis(NamedTuple):
    """One axis of a grown tensor."""

    size: int
    segments: tuple[Segment, ...]
    is_hidden: bool = False


class HeadGrowth:
    """Growth of the tensors of one head.

    Args:
        config: the head's own, with the sizes of its layers.
        small, grown: shapes of its target before and after growth.
    """

    def __init__(self, config: dict[str, Any], small: LlamaShape, grown: LlamaShape) -> None:
        if small.recurrent is not None or grown.experts is not None:
            raise SynthError("heads are grown for Llama targets alone")
        self.d, self.big_d = small.hidden_size, grown.hidden_size
        n_heads = config.get("num_attention_heads", small.n_heads)
        own = replace(
            small,
            n_heads=n_heads,
            n_kv_heads=config.get("num_key_value_heads", n_heads),
            intermediate_size=config.get("intermediate_size", small.intermediate_size),
        )
        self.own, self.grown, self.heads = own, grown, map_heads(own, grown)

    def tensor(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the grown tensor of a small one."""
        if not values.is_floating_point():
            return values  # maps between vocabularies
        if values.ndim == 1:
            return self._vector(values)
        rows, columns = self._axes(name, *values.shape)
        shape = (rows.size, columns.size)
        grown = torch.zeros(shape) if rows.is_hidden else torch.randn(shape) * _STD
        for row in rows.segments:
            for column in columns.segments:
                part = values[row.small :, column.small :][: row.length, : column.length]
                target = grown[row.grown :, column.grown :]
                target[: row.length, : column.length] = part.float()
        return grown.to(values.dtype)

    def _vector(self, values: torch.Tensor) -> torch.Tensor:
        """Return a norm over the hidden size, or a norm of heads as it is."""
        if len(values) > self.d:
            raise SynthError(f"a head with a norm of {len(values)} numbers cannot be grown")
        if len(values) != self.d:
            return values
        scale = math.sqrt(self.d / self.big_d)
        grown = torch.full((self.big_d,), scale)
        grown[: self.d] = values.float() * scale
        return grown.to(values.dtype)

    def _axes(self, name: str, num_rows: int, n_columns: int) -> tuple[Axis, Axis]:
        hidden, e = self._hidden(1), self.own.head_dim
        columns = self._hidden(n_columns // self.d)
        part = name.removesuffix(".weight").rpartition(".")[2]
        queries = Axis(
            self.grown.n_heads * e,
            tuple(Segment(i * e, slot * e, e) for i, slot in enumerate(self.heads.query_slots)),
        )
        keys = Axis(
            self.grown.n_kv_heads * e,
            tuple(
                Segment(head * e, slot * e, e)
                for slot, head in enumerate(self.heads.kv_sources)
                if head is not None
            ),
        )
        f, big_f = self.own.intermediate_size, self.grown.intermediate_size
        neurons = Axis(big_f, (Segment(0, 0, f),))
        axes = {
            "q_proj": (queries, columns),
            "k_proj": (keys, columns),
            "v_proj": (keys, columns),
            "o_proj": (hidden, queries),
            "gate_proj": (neurons, columns),
            "up_proj": (neurons, columns),
            "down_proj": (hidden, neurons),
            "lm_head": (Axis(num_rows, (Segment(0, 0, num_rows),)), hidden),
        }
        if part in axes:
            return axes[part]
        if num_rows != self.d or n_columns % self.d:
            raise SynthError(f"a head with {name} of {num_rows} x {n_columns} cannot be grown")
        return hidden, columns

    def _hidden(self, n: int) -> Axis:
        """Return `n` hidden states side by side."""
        d, big_d = self.d, self.big_d
        return Axis(n * big_d, tuple(Segment(i * d, i * big_d, d) for i in range(n)), n == 1)


def grow_head(head: Path, small_target: Path, grown_target: Path, out: Path) -> int:
    """Write the head of a grown target; return its bytes.

    Args:
        head: folder of the small target's head.
        grown_target: folder that `grow` made from `small_target`.

    Raises SynthError for another head or target, and for `out` that exists.
    """
    if out.exists():
        raise SynthError(f"{out} exists: name a new folder")
    source, grown = SourceModel(small_target), SourceModel(grown_target)
    config = read_json(head / "config.json")
    layer = config | config.get("transformer_layer_config", {})
    growth = HeadGrowth(layer, source.shape, grown.shape)
    tensors = {name: growth.tensor(name, values) for name, values in _stored(head)}
    places = {small: i for i, small in layer_places(source.shape, grown.shape).items()}
    # Layers after the small target's last one change nothing, and the last state of all is normed.
    places[source.shape.n_layers - 1] = grown.shape.n_layers - 1
    sizes = _sizes(grown_config(source, grown.shape, "bf16"))
    renewed = _with_layer_ids(config, places) | sizes
    of_target = {
        "num_target_layers": grown.shape.n_layers,
        "target_hidden_size": grown.shape.hidden_size,
    }
    renewed |= {key: value for key, value in of_target.items() if key in renewed}
    if "transformer_layer_config" in renewed:
        renewed["transformer_layer_config"] |= sizes
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_json(out / "config.json", renewed)
    return sum(values.nbytes for values in tensors.values())


def _stored(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                yield name, file.get_tensor(name)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    names = (
        "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size "
        "rms_norm_eps"
    )
    return {name: config[name] for name in names.split()}


def _with_layer_ids(value: Any, places: dict[int, int]) -> Any:
    """Return a config whose layers of the target are those of the grown one."""
    if not isinstance(value, dict):
        return value
    changed = {key: _with_layer_ids(item, places) for key, item in value.items()}
    for key in _LAYER_IDS:
        if isinstance(changed.get(key), list):
            changed[key] = [places[i] for i in changed[key]]
    return json.loads(json.dumps(changed))
