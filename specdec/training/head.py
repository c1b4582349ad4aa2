"""TargetHead, the base of draft heads in training: with the target's embedding and output head."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from backends.checkpoint.records import BoundTensor
from backends.hf.loading import load_hf_model
from backends.hf.model import HfModel
from offload.formats.tensors import TensorRecord
from specdec.training.options import TrainError
from specdec.training.trainable import Trainable

_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "logits_mup_width_multiplier",
)
"""Fields of configs whose output head is more than a product."""
_LAYER_KEYS = (
    "hidden_size num_attention_heads head_dim rms_norm_eps max_position_embeddings".split()
)
"""Fields of the target's config that the layers of a new head share."""
_ROPE_THETA = 10_000.0
"""Base of a new head's RoPE where the target's layers have several."""
_MIN_SKIPPED_LAYERS = 4
"""Layers of a target whose first one says too little of the next tokens to be taken."""


class TargetHead(Trainable):
    """A head whose embedding and output head are its target's, and are not trained.

    Args:
        directory: the target's checkpoint.
        vocab_size: tokens of the target; later ones are never proposed.

    Raises TrainError, UnsupportedModel.
    """

    first_position = 1  # the first token has no hidden state before it

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._target = target = load_hf_model(directory)
        _check_scale(target, directory)
        self._vocab_size = vocab_size
        self.dtype, self.max_length = target.dtype, target.max_context
        self.hidden_size = int(target.config.hidden_size)
        embedding = target.model.get_input_embeddings()
        self._embedding = _frozen(embedding, target, directory)
        self._output_head = _frozen(target.model.get_output_embeddings(), target, directory)

    @property
    def frozen_bytes(self) -> int:
        frozen = (self._embedding, self._output_head)
        return sum(4 * p.numel() for module in frozen for p in module.parameters())

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._embedding.to(device)
        self._output_head.to(device)


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Return layers of a target, from an early one to the last but one, whose outputs a new head
    takes.

    The last layer is taken only where there are too few others: llama.cpp does not show its output,
    and programs differ in whether the final norm belongs to it. A target with fewer layers than
    `count` has all of them taken.
    """
    last = max(num_layers - 1, min(num_layers, count)) - 1
    first = int(last >= _MIN_SKIPPED_LAYERS - 1)
    steps = max(1, count - 1)
    return tuple(sorted({first + (last - first) * i // steps for i in range(count)}))


def layer_sizes(target: HfModel, intermediate_size: int | None) -> dict[str, Any]:
    """Return the config of a new head's layers, which are those of Llama or Qwen3.

    At least four heads share keys and values (grouped-query attention), as in published heads.

    intermediate_size: their neurons; None: as the target's.
    """
    config = target.config
    sizes = {key: getattr(config, key) for key in _LAYER_KEYS if hasattr(config, key)}
    n_heads = config.num_attention_heads
    n_kv_heads = min(getattr(config, "num_key_value_heads", None) or n_heads, max(1, n_heads // 4))
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", _ROPE_THETA)
    return {
        **sizes,
        "num_key_value_heads": n_kv_heads if n_heads % n_kv_heads == 0 else n_heads,
        "intermediate_size": intermediate_size or config.intermediate_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": target.vocab_size,
    }


def initialise(model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
    """Give a head on the meta device random values; its layers add nothing at first."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape))
    for module in model.modules():
        model._init_weights(module)
    with torch.no_grad():
        for name, parameter in (named for layer in layers for named in layer.named_parameters()):
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()


def load_values(model: PreTrainedModel, stored: HfModel, directory: Path) -> None:
    """Give a head on the meta device the values of a checkpoint's, in float32."""
    names = {id(module): name for name, module in stored.model.named_modules()}
    layers = (bound for layer in stored.layer_tensors for bound in layer)
    for bound in (*stored.non_layer_tensors, *layers):
        module = model.get_submodule(names[id(bound.module)])
        module._parameters[bound.attribute] = nn.Parameter(_values(bound, directory))


def _check_scale(target: HfModel, directory: Path) -> None:
    config = target.config
    scale = next((name for name in _SCALES if getattr(config, name, None) not in (None, 1.0)), None)
    if scale is not None:
        raise TrainError(
            f"{directory} scales its logits ({scale}), for which no head can be trained yet: align "
            "a draft model with --from"
        )


def _frozen(module: nn.Module, target: HfModel, directory: Path) -> nn.Module:
    """Return a copy of the target's module with its weights, which are not trained."""
    result = copy.deepcopy(module)
    for bound in target.non_layer_tensors:
        if bound.module is module:
            values = nn.Parameter(_values(bound, directory), requires_grad=False)
            result._parameters[bound.attribute] = values
    return result


def _values(bound: BoundTensor, directory: Path) -> torch.Tensor:
    """Read a tensor in float32."""
    if bound.packed is not None:
        raise TrainError(
            f"{directory} is packed or quantised: name the plain checkpoint, or align a draft "
            "model with --from"
        )
    parts: Iterable[torch.Tensor] = (_read(part) for part in bound.stored)
    return torch.cat([part.float() for part in parts])


def _read(record: TensorRecord) -> torch.Tensor:
    with safe_open(record.path, framework="pt") as file:
        values: torch.Tensor = file.get_tensor(record.name)
    return values
