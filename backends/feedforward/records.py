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

MIXTURES = "deepseek_v2 deepseek_v3 glm4_moe gpt_oss mixtral olmoe qwen2_moe qwen3_moe".split()
"""Families that were tested."""
STACKED = ("gate_up_proj", "down_proj")
"""Parameters of a module of experts, which are not loaded with the other tensors of its layer."""
_OF_MIXTURES = re.compile(r"Experts|MoE$|Moe$|MoeBlock|Router")
_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
Find = Callable[[str], TensorRecord | None]
Check = Callable[[TensorRecord, Sequence[int]], None]
"""(record, shape): raises an error for another shape or an unsupported dtype."""


def is_experts(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in (*STACKED, "is_transposed", "num_experts"))


def expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of the modules with all experts of a layer."""
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def refuse_other_mixtures(model_type: str, model: nn.Module) -> None:
    """Raise UnsupportedModel for a mixture that specdec does not know."""
    is_mixture = any(_OF_MIXTURES.search(type(module).__name__) for module in model.modules())
    if is_mixture and model_type not in MIXTURES:
        raise UnsupportedModel(
            f"{model_type} is a mixture of experts that specdec does not know: "
            f"of checkpoints it runs {', '.join(MIXTURES)}; take a GGUF file of it"
        )


def find_experts(
    name: str, module: Any, n_used: int, find: Find, check: Check, where: str
) -> LayerExperts:
    """Return the tensors of every expert of module `name`.

    where: the checkpoint's name in error messages. Raises CheckpointError, UnsupportedModel.
    """
    if not 1 <= n_used <= module.num_experts:
        raise CheckpointError(
            f"{where}: config.json takes {n_used} of {module.num_experts} experts for a token, "
            f"must be 1 to {module.num_experts}: take the config.json of these weights"
        )
    stacked = [find(f"{name}.{part}") for part in STACKED]
    parts = next((p for p in _SEPARATE if find(f"{name}.0.{p[0]}.weight")), None)
    if parts is not None and stacked[1] is not None:
        raise CheckpointError(
            f"{where} has {name}.{STACKED[1]} as one tensor for all experts and as one for each: "
            "the checkpoint is ambiguous, remove either or download it again"
        )
    if all(stacked):
        shapes = [tuple(getattr(module, part).shape) for part in STACKED]
        whole = [record for record in stacked if record is not None]
        for record, shape in zip(whole, shapes, strict=True):
            check(record, shape)
        sliced = (tuple(_slice(r, i) for r in whole) for i in range(module.num_experts))
        return LayerExperts(tuple(sliced), n_used)
    two_inner, hidden = module.gate_up_proj.shape[1:]
    inner = two_inner // 2
    shapes = [(inner, hidden), (inner, hidden), (hidden, inner)]
    experts = []
    for i in range(module.num_experts):
        records = []
        for part, shape in zip(parts or _SEPARATE[0], shapes, strict=True):
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


def _slice(record: TensorRecord, expert: int) -> TensorRecord:
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
