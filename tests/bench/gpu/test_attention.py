"""The attention benchmark's implementations compute the same result."""

import torch

from bench.gpu import attention


def test_both_implementations_compute_the_same() -> None:
    item = attention.compare((4, 2, 8), 6, 40, torch.float32, torch.device("cpu"), n_runs=1)
    assert (item.heads, item.kv_heads, item.n_nodes, item.n_context) == (4, 2, 6, 40)
    assert min(item.whole_seconds, item.segments_seconds) > 0
    assert item.difference <= 1e-5
