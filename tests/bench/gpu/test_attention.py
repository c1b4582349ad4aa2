"""The comparison of ways to compute attention compares the same thing."""

import pytest
import torch

from bench.gpu import attention


def test_both_ways_compute_the_same() -> None:
    one = attention.compare((4, 2, 8), 6, 40, torch.float32, torch.device("cpu"), n_runs=1)
    assert (one.heads, one.kv_heads, one.n_nodes, one.n_context) == (4, 2, 6, 40)
    assert min(one.whole_seconds, one.segments_seconds) > 0
    assert one.difference <= 1e-5


def test_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(attention, "_HEADS", ((4, 2, 8),))
    monkeypatch.setattr(attention, "_CONTEXTS", (16,))
    monkeypatch.setattr(attention, "_NODES", (2, 3))
    monkeypatch.setattr("sys.argv", ["attention", "--dtype", "float32", "--runs", "1"])
    attention.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [
        ["4", "2", "8", "2", "16"],
        ["4", "2", "8", "3", "16"],
    ]
