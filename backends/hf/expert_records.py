"""The tensors of a checkpoint's experts, layer by layer."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from backends.checkpoint.architecture import language_config
from backends.checkpoint.matching import TensorMatch
from backends.checkpoint.records import check_record
from backends.contract.backend import UnsupportedModel
from backends.feedforward.records import experts_per_token, find_experts, is_experts
from offload.placement.experts import LayerExperts


def experts_by_layer(
    model: PreTrainedModel,
    layers_name: str,
    layers: tuple[nn.Module, ...],
    match: TensorMatch,
    directory: Path,
) -> tuple[tuple[nn.Module | None, ...], tuple[LayerExperts | None, ...]]:
    """Return (the module that computes the experts, the experts) per layer; ((), ()) if dense."""
    modules: list[nn.Module | None] = []
    experts: list[LayerExperts | None] = []
    for index, layer in enumerate(layers):
        matches = [(name, module) for name, module in layer.named_modules() if is_experts(module)]
        if len(matches) > 1:
            raise UnsupportedModel(
                f"{model.config.model_type} is not supported: layer {index} has {len(matches)} "
                "mixtures; take a GGUF file of it"
            )
        name, module = matches[0] if matches else ("", None)
        modules.append(module)
        experts.append(
            None
            if module is None
            else find_experts(
                f"{layers_name}.{index}.{name}",
                module,
                experts_per_token(language_config(model.config), len(module.down_proj)),
                match.find,
                lambda record, shape: check_record(record, shape, record.name, directory),
                str(directory),
            )
        )
    return (tuple(modules), tuple(experts)) if any(experts) else ((), ())
