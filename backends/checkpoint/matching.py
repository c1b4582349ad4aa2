"""Which tensor of a checkpoint each parameter takes: the one that transformers would load there.

Files, index and config may disagree: a head that the config ties and the file has, the base model's
prefix missing or doubled, one tensor under two names. The rules are those of transformers'
`convert_and_load_state_dict_in_model` and `PreTrainedModel.tie_weights`, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
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
    """All tensors, by the names that this transformers gives them."""
    shared: Mapping[str, str]
    """Parameter -> the one whose tensor it takes in place of its own."""
    untied: tuple[tuple[str, str], ...] = ()
    """(parameter, the one that the config ties it to): both have tensors, which differ."""

    def find(self, name: str) -> TensorRecord | None:
        """The tensor of a parameter, a buffer or an expert."""
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
    """The match of a model without any files."""
    return TensorMatch({}, dict(model.all_tied_weights_keys))


def match_tensors(
    model: PreTrainedModel,
    index: Mapping[str, TensorRecord],
    packed: Mapping[str, PackedTensor],
    directory: Path,
) -> TensorMatch:
    """Find the tensor of every parameter of a model on the meta device.

    packed: tensors that are decoded, by the names of the parameters that they are decoded into.
    Raises CheckpointError for a checkpoint that is ambiguous or cannot be read.
    """
    parts = {part.name for tensor in packed.values() for part in tensor.stored}
    known = {name: record for name, record in index.items() if name not in parts}
    known |= {name: tensor.record for name, tensor in packed.items()}
    named = known if _has_todays_names(model, known) else _renamed(known, model, directory)
    shared, untied = share(
        model.all_tied_weights_keys,
        named,
        lambda item, other: have_same_bytes(named[item], named[other]),
    )
    return TensorMatch(named, shared, untied)


def _has_todays_names(model: PreTrainedModel, known: Mapping[str, TensorRecord]) -> bool:
    """Whether no name needs to be looked up in transformers' list of older ones, which it takes a
    fifth of a second to make. Most checkpoints have these names and no others."""
    todays = model.state_dict().keys()
    experts = tuple(f"{name}." for name, _ in expert_modules(model))
    return all(name in todays or name.startswith(experts) for name in known)


def _renamed(
    known: Mapping[str, TensorRecord], model: PreTrainedModel, directory: Path
) -> dict[str, TensorRecord]:
    """The tensors under today's names; of two with one name the first in transformers' order.

    Tensors that transformers would merge or split while loading keep names of their own: experts
    are read from where they lie, other parameters are then reported as missing.
    """
    names = _Names(model)
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


class _Names:
    """Today's names of a model's tensors."""

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._known: dict[str, torch.Tensor] = model.state_dict()
        self._prefix = model.base_model_prefix

    def today(self, old: str) -> tuple[str, bool]:
        """(name, whether the tensor is one of several that make a parameter)"""
        lists = self._renamings, self._converters
        name, pattern = rename_source_key(old, *lists, self._prefix, self._known)
        if name not in self._known and old in self._known:
            name, pattern = rename_source_key(old, [], [], self._prefix, self._known)
        if pattern is None:
            return name, False
        merged, _ = rename_source_key(old, *lists)
        own, _ = rename_source_key(old, self._renamings, [])
        if name.endswith(merged):  # the prefix was missing, or is as it should be
            return name.removesuffix(merged) + own, True
        return own.removeprefix(merged.removesuffix(name)), True


def share(
    tied: Mapping[str, str],
    present: Mapping[str, TensorRecord],
    is_same: Callable[[str, str], bool],
) -> tuple[dict[str, str], tuple[tuple[str, str], ...]]:
    """(parameter -> the one whose tensor it takes, pairs that differ and are not tied).

    tied: parameter -> the one that its config ties it to. What the files have of a pair is taken
    for both.
    """
    there = set(present)
    shared: dict[str, str] = {}
    untied = []
    for target, source in tied.items():
        if source in there and target in there:
            if not is_same(shared.get(source, source), shared.get(target, target)):
                untied.append((target, source))
                continue
        elif target in there:
            target, source = source, target
        elif source not in there:
            continue
        shared[target] = shared.get(source, source)
        there.add(target)
    return shared, tuple(untied)
