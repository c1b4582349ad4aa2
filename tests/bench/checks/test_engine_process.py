"""Streams of users, with the engine in its own process and in the server's, on the pair."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("fastapi")

from bench.checks import engine_process
from bench.checks.engine_process import OWN, SHARED, Streams, p95


@pytest.mark.slow
def test_both_places_serve_all_users(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine_process.main("pair:target", users=2, max_tokens=6, n_runs=1, port=port)
    table, line = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert OWN in table
    assert SHARED in table
    for runs in json.loads(line)["runs"].values():
        assert len(runs) == 1
        assert runs[0]["tokens_per_second"] > 0
        assert runs[0]["p95"] >= 0


def test_the_95th_percentile_is_that_of_all_gaps() -> None:
    assert p95(Streams(1, 1.0, [i / 100 for i in range(101)])) == pytest.approx(0.96, abs=0.01)
