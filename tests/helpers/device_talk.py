"""Calls to a backend on a device, fake or real, and to the backend that it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from alone import own
from cpu_engine import CpuEngine
from tiered import DEVICE, HOST, STORAGE, tiered_model

from backends.contract.backend import PREFIX, Backend
from backends.cuda.engine import CudaEngine, cuda_problem
from backends.cuda.weights import DeviceWeights, TorchEngine
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from offload.units import GIB

NEEDS_CUDA = pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or "")
ENGINES = [
    pytest.param(CpuEngine, id="fake"),
    pytest.param(lambda: CudaEngine(2 * GIB), id="cuda", marks=[pytest.mark.cuda, NEEDS_CUDA]),
]
"""Engine factories: the fake device, and CUDA."""
PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
NODES, PARENTS = [7, 20, 30, 21, 22, 31, 40], [-1, 0, 0, 1, 3, 2, 3]
TIERS = [STORAGE, HOST, DEVICE, STORAGE, HOST]


def everywhere(layer: int, tensor: int) -> str:
    """Distribute tensors over the tiers in turn."""
    return TIERS[(layer + tensor) % 5]


def all_there(layer: int, tensor: int) -> str:
    return DEVICE


def on_device(
    directory: Path,
    engine: TorchEngine,
    tier_of: Callable[[int, int], str] = everywhere,
    **options: Any,
) -> TorchBackend:
    model = load_hf_model(directory)
    return TorchBackend(
        model, DeviceWeights(model, tiered_model(model, tier_of), engine), **options
    )


def conversation(backend: Backend) -> list[np.ndarray]:
    """Run a prompt, a tree, a commit that moves rows, a tree below it, a rollback, a prompt."""
    seen = [own(backend).prefill(PROMPT)]
    first = own(backend).next_node_id
    ids, logits = own(backend).extend(NODES, [PREFIX if p < 0 else first + p for p in PARENTS])
    seen.append(logits)
    own(backend).commit([ids[0], ids[2]], keep=[ids[5]])
    seen.append(own(backend).extend([50, 51], [ids[5], PREFIX], logits_at=[1])[1])
    own(backend).rollback(5)
    return [*seen, own(backend).prefill(PROMPT[5:])]
