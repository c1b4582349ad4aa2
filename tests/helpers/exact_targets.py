"""Batch-invariant targets, as `specdec.load` makes them, but without a plan."""

from __future__ import annotations

from pathlib import Path

import torch

from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from backends.hf.self_test import find_exactness


def exact_resident(directory: Path, *, max_context: int | None = None) -> TorchBackend:
    """Load the target wholly into memory."""
    model = load_hf_model(directory)
    exactness = find_exactness(model, torch.get_num_threads())
    assert exactness.is_exact, exactness
    return TorchBackend.kept_in_memory(model, max_context=max_context, exactness=exactness)
