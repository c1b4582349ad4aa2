"""Routing statistics: counts that are known, and a run on the embedded mixture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.experts.routing import distinct, of_chains, uniform, visits

pytest.importorskip("torch")


def test_counts_of_a_known_text() -> None:
    # Two layers, four tokens, two experts each.
    routes = np.array([[[0, 1], [1, 2], [0, 1], [0, 1]], [[3, 4], [3, 4], [3, 4], [5, 6]]])
    assert distinct(routes[:, :1]) == 1.0
    assert distinct(routes) == (3 + 4) / 2 / 2
    assert of_chains(routes, 1) == 1.0
    assert of_chains(routes, 2) == ((3 + 2) / 2 + (2 + 4) / 2) / 2 / 2
    assert visits(routes[:, :2]) == [(0, (0, 1)), (1, (3, 4)), (0, (1, 2)), (1, (3, 4))]


def test_uniform_routing_is_what_random_draws_give() -> None:
    random = np.random.default_rng(0)
    drawn = [
        len({e for _ in range(8) for e in random.choice(16, 3, replace=False)}) / 3
        for _ in range(4000)
    ]
    assert uniform(16, 3, 8) == pytest.approx(np.mean(drawn), rel=0.01)


def test_the_embedded_mixture_asks_for_fewer_than_uniform_routing_would(tmp_path: Path) -> None:
    from bench.experts.routing import app
    from specdec.cli.errors import run_app

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text(json.dumps({"prompt": "def area(r):"}))
    argv = ["--prompts", str(prompts), "-n", "33", "--output-file", str(out)]
    assert run_app(app, "routing", argv) == 0
    found = json.loads(out.read_text())
    assert (found["experts"], found["experts_of_a_token"], found["layers"]) == (64, 4, 6)
    rows = found["by_rows"]
    assert rows["1"] == {"chain": 1.0, "siblings": 1.0, "uniform": 1.0}
    for kind in ("chain", "siblings"):
        counts = [rows[n][kind] for n in ("1", "2", "4", "8", "16", "32")]
        assert counts == sorted(counts)
        assert counts[-1] < rows["32"]["uniform"]
    for rates in found["hit_rates"].values():
        assert max(rates["own rule"], rates["least recently used"]) <= rates["belady"]
