"""Torch takes as many threads as it is told, or as many as the process may use."""

from __future__ import annotations

import pytest
import torch

from backends.hf import threads
from backends.hf.threads import use_threads

pytestmark = pytest.mark.usefixtures("_torch_threads")


@pytest.mark.parametrize(
    ("asked", "n_torch", "n_cpus", "expected"),
    [(None, 4, 2, 2), (None, 2, 4, 2), (3, 1, 2, 3)],
)
def test_threads(
    asked: int | None, n_torch: int, n_cpus: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cpus", lambda: n_cpus)
    torch.set_num_threads(n_torch)
    use_threads(asked)
    assert torch.get_num_threads() == expected
