"""Matching of checkpoint tensors to parameters, with the same result as loading by transformers.

Files, index and config may disagree: a head that the config ties and the file has, the base model's
prefix missing or doubled, one tensor under two names. The rules are those of transformers'
`convert_and_load_state_dict_in_model` and `PreTrainedModel.tie_weights`, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from backends.feedforward.records import expert_modules
from backends.packed.tensor import PackedTensor
from offload.formats.comparing import have_same_bytes
from offload.formats.tensors import CheckpointError, TensorRecord


@dataclass(frozen=True)
class TensorMatch:
    """The tensors of a checkpoint, by the parameters of a model."""

    named: Mapping[str, TensorRecord]
    """All tensors, by their names in the installed transformers."""
    shared: Mapping[str, str]
    """Parameter -> the parameter whose tensor it uses instead of its own."""
    merged: Mapping[str, tuple[TensorRecord, ...]] = field(default_factory=dict)
    """Parameters that the files have as several tensors, to be concatenated."""
    untied: tuple[tuple[str, str], ...] = ()
    """(parameter, parameter that the config ties it to) whose tensors exist and differ."""

    def find(self, name: str) -> TensorRecord | None:
        """Return the tensor of a parameter, a buffer or an expert."""
        return self.named.get(self.shared.get(name, name))

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(
            f"config.json ties {name} to {source}, but the checkpoint has both with different "
            "values: each is used as it is, as transformers does; set tie_word_embeddings to "
            "false in config.json to say so"
            for name, source in self.untied
        )


def match_config(model: PreTrainedModel) -> TensorMatch:
    """Return the match of a model without any files."""
    return TensorMatch({}, dict(model.all_tied_weights_keys))


def match_tensors(
    model: PreTrainedModel,
    index: Mapping[str, TensorRecord],
    packed: Mapping[str, PackedTensor],
    directory: Path,
) -> TensorMatch:
    """Find the tensor of every parameter of a model on the meta device.

    packed: packed tensors, by the names of the parameters that they are decoded into.
    Raises CheckpointError for a checkpoint that is ambiguous or cannot be read.
    """
    known = known_tensors(index, packed)
    named = known if _has_todays_names(model, known) else _renamed(known, model, directory)
    shared, untied = share(
        model.all_tied_weights_keys,
        named,
        lambda name, other: have_same_bytes(named[name], named[other]),
    )
    return TensorMatch(named, shared, _merged(model, named), untied)


def known_tensors(
    index: Mapping[str, TensorRecord], packed: Mapping[str, PackedTensor]
) -> dict[str, TensorRecord]:
    """Return the tensors of a checkpoint by the names of what packed ones are decoded into."""
    parts = {part.name for tensor in packed.values() for part in tensor.stored}
    known = {name: record for name, record in index.items() if name not in parts}
    return known | {name: tensor.record for name, tensor in packed.items()}


def _has_todays_names(model: PreTrainedModel, known: Mapping[str, TensorRecord]) -> bool:
    """Return whether all names are current, as in most checkpoints: building transformers' list of
    older names takes 0.2 s."""
    todays = model.state_dict().keys()
    experts = tuple(f"{name}." for name, _ in expert_modules(model))
    return all(name in todays or name.startswith(experts) for name in known)


def _renamed(
    known: Mapping[str, TensorRecord], model: PreTrainedModel, directory: Path
) -> dict[str, TensorRecord]:
    """Return the tensors under current names; the first in transformers' order on a collision.

    Tensors that transformers would merge or split while loading keep names of their own: experts
    are read as they are stored, other parameters are then reported as missing.
    """
    names = CurrentNames(model, get_model_conversion_mapping(model))
    renamed: dict[str, TensorRecord] = {}
    for old in sorted(known, key=dot_natural_key):
        name, is_part = names.today(old)
        record = known[old]
        other = renamed.setdefault(name, record)
        if other is not record and (is_part or other.scheme or record.scheme):
            raise CheckpointError(
                f"{directory}: {other.name} and {old} are both {name}: the checkpoint is "
                "ambiguous, remove one of them or download it again"
            )
    return renamed


def _merged(
    model: PreTrainedModel, named: Mapping[str, TensorRecord]
) -> dict[str, tuple[TensorRecord, ...]]:
    """Return the tensors that transformers would concatenate into a parameter that is missing."""
    missing = [name for name in model.state_dict() if name not in named]
    merged = {}
    for converter in get_model_conversion_mapping(model) if missing else ():
        if not isinstance(converter, WeightConverter) or len(converter.target_patterns) != 1:
            continue
        operation, *more = converter.operations
        if not isinstance(operation, Concatenate) or operation.dim or more:
            continue
        target, *sources = (
            pattern.replace("\\.", ".")
            for pattern in (*converter.target_patterns, *converter.source_patterns)
        )
        for name in missing:
            parts = [named.get(name.replace(target, source)) for source in sources]
            if target in name and all(parts):
                merged[name] = tuple(part for part in parts if part is not None)
    return merged


class CurrentNames:
    """Names of a model's tensors in the installed transformers.

    transforms: transformers' renamings and conversions of the model's checkpoints.
    """

    def __init__(self, model: PreTrainedModel, transforms: Sequence[WeightTransform]) -> None:
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._known: dict[str, torch.Tensor] = model.state_dict()
        self._prefix = model.base_model_prefix

    def today(self, old: str) -> tuple[str, bool]:
        """Return (current name, whether the tensor is one of several that form a parameter)."""
        lists = self._renamings, self._converters
        name, pattern = rename_source_key(old, *lists, self._prefix, self._known)
        if name not in self._known and old in self._known:
            name, pattern = rename_source_key(old, [], [], self._prefix, self._known)
        if pattern is None:
            return name, False
        merged, _ = rename_source_key(old, *lists)
        own, _ = rename_source_key(old, self._renamings, [])
        if name.endswith(merged):  # the prefix was missing, or is right
            return name.removesuffix(merged) + own, True
        return own.removeprefix(merged.removesuffix(name)), True


def share(
    tied: Mapping[str, str],
    present: Mapping[str, TensorRecord],
    is_same: Callable[[str, str], bool],
) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """Return (parameter -> the parameter whose tensor it uses, pairs that differ and stay untied).

    tied: parameter -> the parameter that the config ties it to. If the files have only one of a
    pair, both use it.
    """
    stored = set(present)
    shared: dict[str, str] = {}
    untied = []
    for target, source in tied.items():
        if source in stored and target in stored:
            if not is_same(shared.get(source, source), shared.get(target, target)):
                untied.append((target, source))
                continue
        elif target in stored:
            target, source = source, target
        elif source not in stored:
            continue
        shared[target] = shared.get(source, source)
        stored.add(target)
    return shared, tuple(untied)
