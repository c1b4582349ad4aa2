"""Measurements of this machine that plans are compared by, as far as a run needs them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from backends.contract.source import ModelCompute, ModelSource
from offload.formats.outline import is_outline
from offload.paging.expert_speed import missing_seconds_per_byte
from offload.ring.bandwidth import measure_storage
from specdec.models.opened import Sources
from specdec.planning.candidate_cost import measure_draft
from specdec.run_options import CUDA

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measurements:
    """A machine's speed, for one pair of models."""

    storage_bytes_per_second: float
    target: ModelCompute
    draft: ModelCompute | None
    """Speed of the draft on the CPU."""
    gpu_draft: ModelCompute | None = None
    copy_bytes_per_second: float = 0.0
    """Bandwidth from pinned host memory to the GPU's, if the target runs there."""
    expert_seconds_per_byte: float = 0.0
    """Extra seconds for missing experts of the target, beyond the storage's bandwidth."""

    def draft_on(self, device: str | None) -> ModelCompute | None:
        return self.gpu_draft if device == CUDA else self.draft


def measure_figures(pair: Sources, total_bytes: int) -> Measurements:
    """Measure this machine's speed, as far as a budget of `total_bytes` needs it."""
    target, draft = pair.sources
    storage = measure_storage(target.weight_file).storage_bytes_per_second
    return Measurements(
        storage,
        target.measure_compute(beside_reads=must_stream(target, total_bytes)),
        None if draft is None else measure_draft(draft),
        expert_seconds_per_byte=measure_experts(target, total_bytes, storage),
    )


def measure_experts(
    source: ModelSource, total_bytes: int, storage_bytes_per_second: float
) -> float:
    """Return the extra seconds per byte of missing experts, beyond the storage's bandwidth; 0 where
    a budget of `total_bytes` holds all, or there are none."""
    if not any(source.experts) or not must_stream(source, total_bytes):
        return 0.0
    if is_outline(source.weight_file):
        logger.warning("no experts here to fetch: they are taken to be read as fast as layers")
        return 0.0
    return max(0.0, missing_seconds_per_byte(source.experts) - 1.0 / storage_bytes_per_second)


def must_stream(source: ModelSource, total_bytes: int) -> bool:
    """Return whether a model's layers alone are larger than `total_bytes`."""
    return layer_bytes(source) > total_bytes


def layer_bytes(source: ModelSource) -> int:
    """Return the bytes of all layers as stored, experts included."""
    n_bytes = sum(layer.n_bytes for layer in source.layers)
    return n_bytes + sum(experts.n_bytes for experts in source.experts if experts is not None)
