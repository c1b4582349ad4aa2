"""Torch uses the requested number of threads, or as many as the process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from alone import own

from backends.contract.backend import PREFIX, Backend
from backends.contract.source import BackendOptions, Loading
from backends.hf import runner as hf_runner
from backends.hf import threads
from backends.hf.self_test import TorchExactness
from backends.hf.source import HfSource
from backends.hf.threads import keep_few_kernels, use_threads
from offload.placement.plan import plan_placement
from offload.process import cpus

pytestmark = pytest.mark.usefixtures("_torch_threads")


@pytest.mark.parametrize(
    ("asked", "n_torch", "n_cpus", "expected"),
    [(None, 4, 2, 2), (None, 2, 4, 2), (3, 1, 2, 3)],
)
def test_threads(
    asked: int | None, n_torch: int, n_cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: n_cpus)
    monkeypatch.setattr(threads, "_default_threads", lambda: n_torch)
    assert use_threads(asked) == expected
    assert torch.get_num_threads() == expected


def load(directory: Path, exactness: TorchExactness) -> Backend:
    source = HfSource(directory, BackendOptions(is_exact=True))
    source.exactness = exactness
    return source.load(Loading(plan_placement(source.layers, 1 << 40), 32, 4, 4))


def test_a_model_that_follows_the_load_leaves_the_threads_of_others_alone(
    checkpoint_factory: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft does so while its target's sums depend on threads; a thread new to torch starts
    with the last setting."""
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    monkeypatch.setattr(threads, "_default_threads", lambda: 2)
    monkeypatch.setattr(cpus, "free_cpus", lambda: 1)
    run_model, actual = hf_runner.run_model, []

    def run(*args: Any) -> torch.Tensor:
        actual.append(torch.get_num_threads())
        return run_model(*args)

    monkeypatch.setattr(hf_runner, "run_model", run)
    directory = checkpoint_factory("llama")
    with (
        load(directory, TorchExactness(True, is_thread_invariant=False)) as target,
        load(directory, TorchExactness(True, is_thread_invariant=True)) as draft,
    ):
        for backend in (draft, target, draft):
            own(backend).prefill([5, 6, 7])
            own(backend).rollback(0)
        assert torch.get_num_threads() == 2  # for callers between passes
        torch.set_num_threads(1)
        thread = Thread(target=lambda: own(target).prefill([5, 6, 7]))
        thread.start()
        thread.join()
        own(target).extend([8], [PREFIX])
    assert actual == [1, 2, 1, 2, 2]


_MANY_SHAPES = """
import os, sys
import torch
from backends.hf.threads import keep_few_kernels
from offload.process.memory import process_memory
keep_few_kernels()
weight = torch.randn(384, 384).bfloat16()
def compute(rows):
    for n in rows:
        torch.nn.functional.linear(torch.randn(n, 384).bfloat16(), weight)
compute(range(1, 65))
before = process_memory().anonymous_bytes
compute(range(65, 513))
print(process_memory().anonymous_bytes - before)
"""


@pytest.mark.slow
def test_products_of_many_numbers_of_rows_keep_few_kernels() -> None:
    """With up to 1 024 in each cache, the library default, they took 312 MB besides the plan."""
    done = subprocess.run(
        [sys.executable, "-c", _MANY_SHAPES], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 16 << 20


def test_the_users_own_number_of_kernels_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "5")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    keep_few_kernels()
    assert os.environ["LRU_CACHE_CAPACITY"] == "5"
    assert int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) > 0
