"""`specdec analyze` of a mixture of experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import save_tiny_gguf

from specdec.analysis.analyze import analyze

pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf


def test_a_mixture_is_reported_with_its_hit_rates(tmp_path: Path) -> None:
    path = save_tiny_gguf("qwen3moe", tmp_path / "m.gguf")
    actual = analyze(path, on="ufs-3.1", memory_budget="8GiB", threads=1)
    lines = actual.text().splitlines()
    assert any(line.startswith("experts  in 8.00 GiB of memory: ") for line in lines)
    assert sum(" of memory: " in line for line in lines) == 1 + 5
    value = actual.to_dict()
    assert value["experts"]["hit_rate"] == 1.0
    rates = [item["hit_rate"] for item in value["experts_by_memory"]]
    assert rates == sorted(rates)
    assert 0 < rates[-1] < 1
