"""Matrices of a checkpoint that must be decoded: packed ones, as its files say, and quantised ones,
as its config says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from backends.contract.backend import UnsupportedModel
from backends.packed.codec import QUANTISATIONS, Quantisation, as_described, broken, check_packed
from backends.packed.tensor import TORCH_TYPES, PackedTensor
from offload.formats.tensors import CheckpointError, TensorRecord

_REMEDY = "use its bf16, fp16 or fp32 checkpoint"


def quantisation_of(config: PreTrainedConfig) -> Quantisation | None:
    """Return how a checkpoint is quantised, or None if it is not. Raises UnsupportedModel."""
    settings = _settings(config)
    if not settings:
        return None
    method = settings.get("quant_method")
    quantisation = QUANTISATIONS.get(method) if isinstance(method, str) else None
    kind = config.model_type
    if quantisation is None:
        raise UnsupportedModel(
            f"{kind} checkpoint is quantised as {str(method)[:40]!r}, and "
            f"{', '.join(QUANTISATIONS)} are known: {_REMEDY}"
        )
    quantisation = as_described(quantisation, settings)
    try:
        quantisation.check_settings(settings)
    except ValueError as error:
        raise UnsupportedModel(
            f"{kind} checkpoint is quantised as {method!r} with {error}: {_REMEDY}"
        ) from error
    return quantisation


def _settings(config: PreTrainedConfig) -> Mapping[str, Any]:
    """Return the quantisation settings, empty if there are none."""
    settings = getattr(config, "quantization_config", None) or {}
    result: Mapping[str, Any] = settings if isinstance(settings, dict) else settings.to_dict()
    return result


def packed_tensors(
    index: Mapping[str, TensorRecord], config: PreTrainedConfig, dtype: torch.dtype, directory: Path
) -> dict[str, PackedTensor]:
    """Return the packed tensors, by the names of the parameters that they are decoded into.

    Raises CheckpointError for tensors that do not match their description.
    """
    tensors = {name: PackedTensor(record) for name, record in index.items() if record.scheme}
    quantisation = quantisation_of(config)
    if quantisation is not None:
        tensors |= _quantised(index, quantisation, dtype, directory)
    for tensor in tensors.values():
        check_packed(tensor)
        if quantisation is not None and tensor.stored:
            try:
                quantisation.check_described(tensor, _settings(config))
            except ValueError as error:
                raise broken(tensor.record, error) from error
    return tensors


def _quantised(
    index: Mapping[str, TensorRecord],
    quantisation: Quantisation,
    dtype: torch.dtype,
    directory: Path,
) -> dict[str, PackedTensor]:
    main, *remaining = quantisation.suffixes
    number_format = next(name for name, kind in TORCH_TYPES.items() if kind == dtype)
    tensors = {}
    for name, record in index.items():
        module = _module_of(name, main, quantisation)
        if module is None or record.scheme or not quantisation.is_main(record):
            continue
        for other in remaining:
            if module + other not in index:
                raise CheckpointError(
                    f"{directory} lacks {module}{other}, which {name} is decoded with: the "
                    "download is incomplete"
                )
        beside = [module + other for other in (*remaining, *quantisation.optional)]
        stored = (record, *(index[other] for other in beside if other in index))
        whole = _whole_of(module, quantisation)
        if whole != name and whole in index:
            raise CheckpointError(f"{directory} has both {name} and {whole}: which is meant?")
        if any(part.scheme for part in stored):
            raise CheckpointError(
                f"{directory}: a part that {name} is decoded with is packed itself: take the "
                "checkpoint as it was published"
            )
        if len(record.shape) != quantisation.n_dims:
            raise CheckpointError(f"{directory}: {name} has shape {list(record.shape)}, no matrix")
        logical = replace(
            record,
            name=whole,
            dtype=number_format,
            shape=quantisation.shape(stored),
            n_bytes=sum(part.n_bytes for part in stored),
            scheme=quantisation.name,
        )
        is_stacked = quantisation.n_dims > 2
        tensors[logical.name] = PackedTensor(logical, stored, is_transposed=is_stacked)
    _check_all_are_used(index, quantisation, tensors, directory)
    return tensors


def _check_all_are_used(
    index: Mapping[str, TensorRecord],
    quantisation: Quantisation,
    tensors: Mapping[str, PackedTensor],
    directory: Path,
) -> None:
    """Raise CheckpointError for scales that belong to no quantised matrix."""
    main, *remaining = quantisation.suffixes
    for name in index:
        modules = (_module_of(name, suffix, quantisation) for suffix in remaining)
        module = next((module for module in modules if module is not None), None)
        if module is not None and _whole_of(module, quantisation) not in tensors:
            raise CheckpointError(
                f"{directory} has {name}, and no quantised {module}{main} that it is for: take "
                "the checkpoint as it was published"
            )


def _module_of(name: str, suffix: str, quantisation: Quantisation) -> str | None:
    """Return the start of a part's name, up to its suffix, or None for another suffix."""
    full = quantisation.separator + suffix
    return name.removesuffix(suffix) if name.endswith(full) else None


def _whole_of(module: str, quantisation: Quantisation) -> str:
    return module.removesuffix(quantisation.separator) + quantisation.whole
