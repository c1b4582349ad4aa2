"""The comparison of ways to compute attention compares the same thing."""

import torch

from bench.gpu import attention


def test_both_ways_compute_the_same() -> None:
    one = attention.compare((4, 2, 8), 6, 40, torch.float32, torch.device("cpu"), n_runs=1)
    assert (one.heads, one.kv_heads, one.n_nodes, one.n_context) == (4, 2, 6, 40)
    assert min(one.whole_seconds, one.segments_seconds) > 0
    assert one.difference <= 1e-5
