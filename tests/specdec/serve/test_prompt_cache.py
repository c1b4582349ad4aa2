"""A conversation goes on after the server was killed, from the KV in the prompt cache folder."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from agent_session import files_of, prompt
from serving import Server
from tiny_pair import save_model

ASKED = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
OPTIONS = ("-c", "512", "--spec-type", "none")
SLOW_MODEL = """
import os, sys
from specdec.cli.app import main
from specdec.cli.commands import serve
from specdec.policy.cost_model import CostModel
CostModel.extra_seconds = lambda self, num_tokens: float(num_tokens)
starter, same = serve.starter, [sys.executable, "-c", os.environ["SLOW_MODEL"]]
serve.starter = lambda argv, environment: starter([*same, *argv[3:]], environment)
sys.exit(main(sys.argv[1:]))
"""
"""The server's process, and the engine's, which it starts."""


class SlowServer(Server):
    """A server of a model whose tokens are taken to cost a second each, so that files pay."""

    def _start(self, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SLOW_MODEL, *argv]
        pipe = subprocess.PIPE
        environment = {**environment, "SLOW_MODEL": SLOW_MODEL}
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def test_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target, folder = save_model(tmp_path / "target", seed=0), tmp_path / "cache"
    first = {**ASKED, "prompt": prompt(200, 7)}
    second = {**ASKED, "prompt": [*prompt(200, 7), 5, 6, 7]}
    with SlowServer(target, *OPTIONS) as server:
        server.ready()
        expected = server.post("/v1/completions", {**second, "cache_prompt": False})[1]
    options = (*OPTIONS, "--prompt-cache-dir", str(folder))
    with SlowServer(target, *options) as server:
        server.ready()
        server.post("/v1/completions", first)
        server.wait_until_free()
        server.post("/v1/completions", {**ASKED, "prompt": [9]})  # when the file is written
        server.end(signal.SIGKILL)
    assert files_of(folder)
    with SlowServer(target, *options) as server:
        server.ready()
        actual = server.post("/v1/completions", second)[1]
        assert actual["usage"]["prompt_tokens_details"]["cached_tokens"] == 200
        assert actual["choices"] == expected["choices"]
        assert server.metric("specdec_loaded_prefixes_total") == 1
        assert server.metric("specdec_loaded_prefix_tokens_total") == 200
