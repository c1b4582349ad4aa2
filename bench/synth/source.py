"""Reader of the small checkpoint that is grown: its sizes, and its tensors a few rows at a time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.synth.nemotron import EMBEDDING as NEMOTRON_EMBEDDING
from bench.synth.shapes import Experts, LlamaShape, Mamba, Recurrent, SynthError
from offload.formats.checkpoint import WeightIndex
from offload.formats.comparing import have_same_bytes
from offload.formats.tensors import CheckpointError, TensorRecord

_MAX_SIZE = 2**24  # far above any model
_NOT_IN_EVERY_LAYER = ("mlp_only_layers", "use_sliding_window")


MIXTURE = "qwen3_moe"
"""Architecture of mixtures that can be grown."""
HYBRID, HYBRID_MIXTURE = "qwen3_5_text", "qwen3_5_moe_text"
"""Architecture of hybrids that can be grown, and of mixtures that they are grown to."""
NEMOTRON = "nemotron_h"
"""Architecture of hybrids of Mamba-2, dense ones and mixtures."""


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MTP_PROJECTION = "mtp.fc.weight"


OTHER_NAME_OF_EXPERTS = "num_local_experts"
"""Name of `num_experts` in transformers 5."""


class SourceModel:
    """Checkpoint of a Llama, Qwen3-MoE, Qwen3.5 or dense NemotronH in safetensors; tensors are read
    on demand."""

    def __init__(self, folder: Path) -> None:
        """Raise SynthError or CheckpointError if `folder` holds nothing that can be grown."""
        self.folder = folder.expanduser()
        self.config = read_json(self.folder / "config.json")
        self.shape = source_shape(self.config)
        self._records = WeightIndex.from_directory(self.folder)
        table = EMBEDDING if self.shape.mamba is None else NEMOTRON_EMBEDDING
        head, embedding = (self._records.get(name) for name in (HEAD, table))
        if head is None and not self.shape.tied:
            raise SynthError(f"{self.folder} has no {HEAD} although its head is untied")
        if MTP_PROJECTION not in self._records:
            self.shape = replace(self.shape, has_mtp_head=False)
        # A stored head that differs from the embedding is used even if config.json ties it.
        if head and embedding and not have_same_bytes(head, embedding):
            self.shape = replace(self.shape, tied=False)

    def read(self, name: str, rows: range) -> np.ndarray:
        """Return consecutive rows of one tensor, float32 [rows, columns]; a vector is one row.

        Norms are returned as gains: a Qwen3.5's multiply by 1 + weight.
        """
        try:
            record = self._records[name]
        except KeyError:
            raise SynthError(f"{self.folder} has no tensor {name!r}: get it again") from None
        if len(record.shape) == 1:
            vector = read_float32(record).reshape(1, -1)
            return vector + 1 if self._has_gain_less_one(name) else vector
        return read_float32(record, rows).reshape(len(rows), -1)

    def _has_gain_less_one(self, name: str) -> bool:
        is_hybrid = self.shape.recurrent is not None
        is_norm = name.endswith("norm.weight") or name.startswith("mtp.pre_fc_norm_")
        return is_hybrid and is_norm and "linear_attn" not in name


def source_shape(config: dict[str, Any]) -> LlamaShape:
    """Return the sizes in a Hugging Face config.

    Raises:
        SynthError: the model is no plain Llama, Qwen3-MoE, Qwen3.5 or dense NemotronH.
    """
    kind = config.get("model_type")
    if kind not in ("llama", MIXTURE, HYBRID, NEMOTRON):
        raise SynthError(
            f"only Llama, Qwen3-MoE, Qwen3.5 and dense NemotronH models can be grown, not {kind!r}"
        )
    for option in ("attention_bias", "mlp_bias", "quantization_config", *_NOT_IN_EVERY_LAYER):
        if config.get(option):
            raise SynthError(f"a model with {option} cannot be grown")
    mamba = _mamba(config) if kind == NEMOTRON else None
    n_heads = _size(config, "num_attention_heads")
    hidden_size = _size(config, "hidden_size")
    return LlamaShape(
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        n_layers=_size(config, "num_hidden_layers", None if mamba is None else len(mamba.pattern)),
        n_heads=n_heads,
        n_kv_heads=_size(config, "num_key_value_heads", n_heads),
        head_dim=_size(config, "head_dim", hidden_size // n_heads),
        vocab_size=_size(config, "vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config) if kind == MIXTURE else None,
        recurrent=_recurrent(config) if kind == HYBRID else None,
        has_mtp_head=kind == HYBRID and config.get("mtp_num_hidden_layers") == 1,
        mamba=mamba,
    )


def _mamba(config: dict[str, Any]) -> Mamba:
    listed = config.get("layers_block_type") or config.get("layer_types") or ()
    letters = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
    letters |= {"mlp": "-", "moe": "E"}
    pattern = config.get("hybrid_override_pattern") or "".join(letters[kind] for kind in listed)
    expected = {"use_bias": False, "use_conv_bias": True, "mlp_hidden_act": "relu2"}
    if not pattern or not set(pattern) <= set("M*-"):
        raise SynthError(
            "a NemotronH is grown from a dense one, whose MLP becomes the shared expert of a "
            f"mixture: its layers are {pattern or 'not listed'}, of which M, * and - can be grown"
        )
    for option, value in expected.items():
        if config.get(option, value) != value:
            raise SynthError(f"a NemotronH is grown with {option} {value}, not {config[option]!r}")
    names = ("mamba_num_heads", "n_groups", "mamba_head_dim", "ssm_state_size", "conv_kernel")
    return Mamba(pattern, *(_size(config, name) for name in names))


def _recurrent(config: dict[str, Any]) -> Recurrent:
    kinds = config.get("layer_types") or []
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    expected = [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(len(kinds))
    ]
    names = ("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads")
    head_dim, n_keys, n_values = (_size(config, name) for name in names)
    if kinds != expected or not kinds or _size(config, "linear_value_head_dim") != head_dim:
        raise SynthError(
            "a hybrid is grown with attention in every n-th layer, and keys as long as values"
        )
    return Recurrent(n_keys, n_values, head_dim, _size(config, "linear_conv_kernel_dim"), every)


def _experts(config: dict[str, Any]) -> Experts:
    if not config.get("norm_topk_prob") or config.get("decoder_sparse_step", 1) != 1:
        raise SynthError("a mixture is grown with norm_topk_prob and experts in every layer")
    n_experts = "num_experts" if "num_experts" in config else OTHER_NAME_OF_EXPERTS
    names = (n_experts, "num_experts_per_tok", "moe_intermediate_size")
    return Experts(*(_size(config, name) for name in names))


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    """Return a size of the model; `default` if it is null or missing."""
    value = config.get(name)
    if value is None and default is not None:
        return default
    if name not in config:
        raise SynthError(f"config.json lacks {name!r}: download the checkpoint again")
    if type(value) is not int or not 1 <= value <= _MAX_SIZE:
        raise SynthError(
            f"config.json: {name} is {json.dumps(value)[:60]}, must be a whole number from 1 to "
            f"{_MAX_SIZE}: download the checkpoint again"
        )
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file. Raises SynthError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise SynthError(
            f"no {path.name} in {path.parent}: name the folder of a checkpoint in safetensors"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SynthError(f"{path} is no valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise SynthError(f"{path} is not a JSON object: download it again")
    return value


def read_float32(record: TensorRecord, rows: range | None = None) -> np.ndarray:
    """Return one tensor, float32 in its own shape; BF16 and F16 are widened exactly.

    Args:
        record: the tensor.
        rows: consecutive rows (of its first dimension); None: all.

    Raises:
        CheckpointError: the type is another one, or the file is too short.
    """
    if record.scheme:
        raise CheckpointError(
            f"{record.path} stores {record.name} packed as {record.scheme}: name the checkpoint "
            "that was packed"
        )
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(record.dtype)
    if kind is None:
        raise CheckpointError(
            f"{record.path} stores {record.name} as {record.dtype}; BF16, F16 and F32 are read"
        )
    shape, offset = record.shape, record.offset
    if rows is not None:
        offset += rows.start * (record.n_bytes // shape[0])
        shape = (len(rows), *shape[1:])
    n_weights = math.prod(shape)
    raw = np.fromfile(record.path, dtype=kind, count=n_weights, offset=offset)
    if raw.size != n_weights:
        raise CheckpointError(f"{record.path} ends within {record.name}; download it again")
    if record.dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return raw.astype(np.float32, copy=False).reshape(shape)
