"""What tests say to a backend on a device, fake or real, and to another that it is held against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_engine import CpuEngine
from tiered import DEVICE, HOST, STORAGE, tiered_model

from backends.contract.backend import PREFIX, Backend
from backends.cuda.engine import CudaEngine, cuda_problem
from backends.cuda.weights import DeviceWeights, TorchEngine
from backends.hf.backend import TorchBackend
from backends.hf.model import load_hf_model
from offload.units import GIB

NEEDS_CUDA = pytest.mark.skipif(cuda_problem() is not None, reason=cuda_problem() or "")
ENGINES = [
    pytest.param(CpuEngine, id="fake"),
    pytest.param(lambda: CudaEngine(2 * GIB), id="cuda", marks=[pytest.mark.cuda, NEEDS_CUDA]),
]
"""What makes an engine."""
PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
NODES, PARENTS = [7, 20, 30, 21, 22, 31, 40], [-1, 0, 0, 1, 3, 2, 3]
TIERS = [STORAGE, HOST, DEVICE, STORAGE, HOST]
_WIDTHS = (3, 1, 8, 9, 20, 2)
"""Of levels that are run after one another."""


def everywhere(layer: int, tensor: int) -> str:
    """Tensors dealt out over the tiers by turns."""
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
    """A prompt, a tree, a commit that moves rows, a tree below it, a rollback, a prompt."""
    seen = [backend.prefill(PROMPT)]
    first = backend.next_node_id
    ids, logits = backend.extend(NODES, [PREFIX if p < 0 else first + p for p in PARENTS])
    seen.append(np.asarray(logits))
    backend.commit([ids[0], ids[2]], keep=[ids[5]])
    seen.append(np.asarray(backend.extend([50, 51], [ids[5], PREFIX], rows=[1])[1]))
    backend.rollback(5)
    return [*seen, backend.prefill(PROMPT[5:])]


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """The largest one, relative to the largest number."""
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))


def level_after_level(plain: TorchBackend, other: TorchBackend) -> float:
    """Levels of several widths, commits and prunes between them, and another text after them.

    Returns the largest difference between the logits of the two.
    """
    most = 0.0
    for prompt in (PROMPT, PROMPT[:5]):
        for backend in (plain, other):
            backend.rollback(0)
            backend.prefill(prompt)
        rng = np.random.default_rng(len(prompt))
        live: list[int] = []
        for n_new in _WIDTHS:
            tokens, parents = _level(rng, n_new, plain.next_node_id, live)
            (ids, expected), (other_ids, logits) = (
                backend.extend(tokens, parents) for backend in (plain, other)
            )
            assert other_ids == ids
            most = max(most, difference(np.asarray(logits), np.asarray(expected)))
            live += ids
            if n_new == 8:
                for backend in (plain, other):
                    backend.prune(live[:2])
            if n_new == 9:
                path = plain._table.path(live[-1])
                below = [n for n in live if plain._table.path(n)[:-1] == path]
                for backend in (plain, other):
                    backend.commit(path, keep=below)
            live = list(plain._table.ids)
        assert other.n_committed == plain.n_committed
    return most


def _level(
    rng: np.random.Generator, n_new: int, first: int, live: list[int]
) -> tuple[list[int], list[int]]:
    """(tokens, parents); the last one below another of its level."""
    parents = [int(rng.choice([PREFIX, *live])) for _ in range(n_new - 1)]
    parents.append(first if n_new > 1 else PREFIX)
    return rng.integers(3, 90, n_new).tolist(), parents
