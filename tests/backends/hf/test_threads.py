"""Torch takes as many threads as it is told, or as many as the process may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from backends.hf import threads
from backends.hf.threads import keep_few_kernels, use_threads

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


def test_products_of_many_numbers_of_rows_keep_few_kernels() -> None:
    """With up to 1 024 in each cache, as libraries have it, they came to 312 MB beside the plan."""
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
