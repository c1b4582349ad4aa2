"""A conversation goes on after the server was killed, from the KV in the prompt cache folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from agent_session import always_pay, files_of, prompt
from serving import Server
from tiny_pair import save_model

from specdec.policy.cost_model import CostModel

ASKED = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
OPTIONS = ("-c", "512", "--spec-type", "none")


def test_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    always_pay(monkeypatch)  # the server is a fork of this process
    monkeypatch.setattr(CostModel, "extra_seconds", lambda self, num_tokens: float(num_tokens))
    (tmp_path / "target").mkdir()
    target, folder = save_model(tmp_path / "target", seed=0), tmp_path / "cache"
    first = {**ASKED, "prompt": prompt(200, 7)}
    second = {**ASKED, "prompt": [*prompt(200, 7), 5, 6, 7]}
    with Server(target, *OPTIONS) as server:
        server.ready()
        expected = server.post("/v1/completions", {**second, "cache_prompt": False})[1]
    options = (*OPTIONS, "--prompt-cache-dir", str(folder))
    with Server(target, *options) as server:
        server.ready()
        server.post("/v1/completions", first)
        server.wait_until_free()
        server.post("/v1/completions", {**ASKED, "prompt": [9]})  # when the file is written
        server.end(signal.SIGKILL)
    assert files_of(folder)
    with Server(target, *options) as server:
        server.ready()
        actual = server.post("/v1/completions", second)[1]
        assert actual["usage"]["prompt_tokens_details"]["cached_tokens"] == 200
        assert actual["choices"] == expected["choices"]
        assert server.metric("specdec_loaded_prefixes_total") == 1
        assert server.metric("specdec_loaded_prefix_tokens_total") == 200
