"""A session beside short requests, and after a restart, on the embedded pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_session import always_pay

from bench.checks import agent_session

SMALL = {"start_tokens": 300, "new_tokens": 12, "max_tokens": 4, "n_turns": 4, "n_short": 5}


def run(folder: Path, **more: Any) -> None:
    given: dict[str, Any] = {"memory_budget": "2GiB", "kv_tokens": 4096, "n_restarts": 2}
    limits = {"folder": folder, "share": 0.95, "limit": 1e9}
    agent_session.main("pair:target", "pair:draft", **{**given, **SMALL, **limits, **more})


def test_a_session_goes_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    always_pay(monkeypatch)
    run(tmp_path)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["smallest_share"] >= 0.95
    assert result["n_different"] == 0
    assert result["n_texts"] == 4 + 5 + 2
    assert len(result["first_tokens"]) == 4
    for restart in result["restarts"]:
        assert restart["loaded_tokens"] >= 300
        assert restart["computed_tokens"] <= 2 * (12 + 4) + 1  # the last turn or the one before
        assert restart["read_bytes"] > 0
        assert restart["seconds"]["read"] > 0
    assert list(tmp_path.iterdir()) == []


def test_texts_are_compared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    always_pay(monkeypatch)
    record, sizes = tmp_path / "texts.json", {"n_turns": 2, "n_short": 2, "n_restarts": 1}
    run(tmp_path, record=record, **sizes)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n_different"] is None
    run(tmp_path, compare=record)
    assert capsys.readouterr().out == "5 texts, 0 different\n"
    requests = json.loads(record.read_text())
    requests[1][1][0] += 1
    record.write_text(json.dumps(requests))
    with pytest.raises(agent_session.SlowSession, match="1 of 5 texts differ"):
        run(tmp_path, compare=record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_different": 1}, "1 of 9 texts differ"),
        ({"smallest_share": 0.9}, "reused 0.900 .* less than 0.95"),
        ({"ratio": None}, "was not read from storage"),
        ({"ratio": 1.4}, "takes 1.40 x the read"),
    ],
)
def test_what_is_beyond_the_limits_is_told(change: dict[str, Any], message: str) -> None:
    result = {"n_different": 0, "n_texts": 9, "smallest_share": 1.0, "ratio": 1.0}
    agent_session.judge(result, 0.95, 1.3)
    with pytest.raises(agent_session.SlowSession, match=message):
        agent_session.judge({**result, **change}, 0.95, 1.3)
