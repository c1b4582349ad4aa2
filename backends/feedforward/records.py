"""Tensors of a layer's experts in a checkpoint.

transformers has the experts of a layer in one parameter, gate and up together; most checkpoints
have three tensors for each expert, which are read as they are stored. If a checkpoint has one
tensor for all experts, the expert is its first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from backends.contract.backend import UnsupportedModel
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.placement.experts import LayerExperts

_EXPERTS_CLASS = re.compile(r"Experts$")
_SEPARATE = {
    True: (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")),
    False: (("up_proj", "down_proj"), ("w1", "w2")),
}
"""Names of an expert's own tensors in checkpoints, by whether the experts have a gate."""
_NUM_USED = (
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k".split()
)
"""Names that configs have for the number of experts of a token."""
Find = Callable[[str], TensorRecord | None]
Check = Callable[[TensorRecord, Sequence[int]], None]
"""(record, shape): raises an error for another shape or an unsupported dtype."""


def is_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' standard modules of experts."""
    names = ("down_proj", "is_transposed", "has_gate", "num_experts")
    return all(hasattr(module, name) for name in names)


def stacked_parts(module: Any) -> tuple[str, str]:
    """Return the parameters of a module of experts, which are not loaded with the other tensors of
    its layer."""
    return ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the modules with all experts of a layer."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def refuse_other_mixtures(model_type: str, model: nn.Module) -> None:
    """Raise UnsupportedModel for experts that are not computed as transformers' standard ones."""
    for module in model.modules():
        name = type(module).__name__
        if is_experts(module):
            if getattr(module, "has_post_expert_norm", False):
                raise UnsupportedModel(
                    f"{model_type} is not supported: {name} normalises what each expert gives; "
                    "take a GGUF file of it"
                )
        elif _EXPERTS_CLASS.search(name):
            raise UnsupportedModel(
                f"{model_type} is not supported: {name} computes experts in code of its own; take "
                "a GGUF file of it"
            )


def experts_per_token(config: Any, n_experts: int) -> int:
    """Return how many experts a token uses, as its config says.

    Raises UnsupportedModel if it does not say, or says more than there are.
    """
    for key in _NUM_USED:
        value: Any = getattr(config, key, None) if hasattr(type(config), key) else None
        if isinstance(value, int):
            if not 1 <= value <= n_experts:
                raise UnsupportedModel(f"{key} is {value}, must be 1 to {n_experts}, all experts")
            return value
    raise UnsupportedModel(
        f"{config.model_type}: the config does not say how many experts a token uses"
    )


def find_experts(
    name: str, module: Any, n_used: int, find: Find, check: Check, where: str
) -> LayerExperts:
    """Return the tensors of every expert of module `name`.

    where: the checkpoint's name in error messages. Raises CheckpointError, UnsupportedModel.
    """
    stacked_names = stacked_parts(module)
    separate = _SEPARATE[module.has_gate]
    stacked = [find(f"{name}.{part}") for part in stacked_names]
    parts = next((p for p in separate if find(f"{name}.0.{p[0]}.weight")), None)
    if parts is not None and stacked[1] is not None:
        raise CheckpointError(
            f"{where} has {name}.{stacked_names[1]} as one tensor for all experts and as one for "
            "each: the checkpoint is ambiguous, remove either or download it again"
        )
    if all(stacked):
        shapes = [tuple(getattr(module, part).shape) for part in stacked_names]
        whole = [record for record in stacked if record is not None]
        for record, shape in zip(whole, shapes, strict=True):
            check(record, shape)
        sliced = (tuple(slice_record(r, i) for r in whole) for i in range(module.num_experts))
        return LayerExperts(tuple(sliced), n_used)
    if module.is_transposed or not module.is_concatenated:
        kind = type(module).__name__
        raise UnsupportedModel(f"{where}: {kind} is not known with tensors of its own per expert")
    hidden, inner = module.down_proj.shape[1:]
    shapes = [(inner, hidden)] * (1 + module.has_gate) + [(hidden, inner)]
    experts = []
    for i in range(module.num_experts):
        records = []
        for part, shape in zip(parts or separate[0], shapes, strict=True):
            full = f"{name}.{i}.{part}.weight"
            part_record = find(full)
            if part_record is None:
                raise CheckpointError(
                    f"{where} lacks {full}: the download is incomplete or the config is "
                    "another model's"
                )
            check(part_record, shape)
            records.append(part_record)
        experts.append(tuple(records))
    return LayerExperts(tuple(experts), n_used)


def slice_record(record: TensorRecord, expert: int) -> TensorRecord:
    """Return one expert of a tensor that has all experts of a layer."""
    shape = record.shape[1:]
    n_bytes = record.n_bytes // record.shape[0]
    return replace(
        record,
        name=f"{record.name}[{expert}]",
        shape=shape,
        offset=record.offset + expert * n_bytes,
        n_bytes=n_bytes,
    )
