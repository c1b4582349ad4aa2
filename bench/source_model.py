"""Reading the small checkpoint that is grown: its sizes, and its tensors one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.shapes import LlamaShape, SynthError
from offload.index import WeightIndex
from specdec.pair.float_weights import read_float32


class SourceModel:
    """A Llama-architecture checkpoint in safetensors; tensors are read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises a SynthError or CheckpointError if `folder` holds nothing that can be grown."""
        self.folder = folder.expanduser()
        self.config = _read_json(self.folder / "config.json")
        self.shape = source_shape(self.config)
        self._records = WeightIndex.from_directory(self.folder)
        # Old checkpoints may tie without storing it, or store a head that config.json ties.
        if not self.shape.tied and "lm_head.weight" not in self._records:
            raise SynthError(f"{self.folder} has no lm_head.weight although its head is untied")

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor as float32."""
        try:
            return read_float32(self._records[name])
        except KeyError:
            raise SynthError(f"{self.folder} has no tensor {name!r}") from None


def source_shape(config: dict[str, Any]) -> LlamaShape:
    """The sizes in a Hugging Face config.

    Raises:
        SynthError: not a plain Llama.
    """
    kind = config.get("model_type")
    if kind != "llama":
        raise SynthError(f"only Llama-architecture models can be grown, not {kind!r}")
    for option in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(option):
            raise SynthError(f"a Llama with {option} cannot be grown")
    try:
        n_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        return LlamaShape(
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            n_layers=int(config["num_hidden_layers"]),
            n_heads=n_heads,
            n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
            head_dim=int(config.get("head_dim") or hidden_size // n_heads),
            vocab_size=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise SynthError(f"config.json lacks {error.args[0]!r}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SynthError(f"no {path.name} in {path.parent}: not a model folder") from None
    except ValueError as error:
        raise SynthError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise SynthError(f"{path} is not a JSON object")
    return value
