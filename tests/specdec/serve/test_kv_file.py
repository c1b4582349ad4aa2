"""A server whose KV file fails: the stream that needs it ends, the other one goes on."""

from __future__ import annotations

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from agent_session import prompt
from serving import COMPLETIONS, Server, events
from tiny_pair import save_model

SIZES = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
OPTIONS = ("--spec-type", "none", "-c", "2048", "--parallel", "2")
ASKED = {"temperature": 0, "ignore_eos": True, "stream": True}
LONG = {**ASKED, "max_tokens": 8}
SHORT = {**ASKED, "prompt": prompt(90, 9), "max_tokens": 100}
FAILING_FILE = """
import os, sys
from offload.storage import scratch_file
from specdec.cli.app import main
from specdec.cli.commands import serve

def fail(name):
    actual, flag = getattr(scratch_file, name), os.path.join(os.environ["FAULTS"], name)
    def transfer(*where):
        if os.path.exists(flag):
            number = int(open(flag).read())
            raise OSError(number, os.strerror(number))
        return actual(*where)
    setattr(scratch_file, name, transfer)

fail("pread_into")
fail("pwrite_from")
starter, same = serve.starter, [sys.executable, "-c", os.environ["FAILING_FILE"]]
serve.starter = lambda argv, environment: starter([*same, *argv[3:]], environment)
sys.exit(main(sys.argv[1:]))
"""
"""The server's process, and the engine's, which it starts."""


class FailingServer(Server):
    """A server whose KV file fails with the number in a file FAULTS/NAME of the call."""

    def _start(self, argv: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", FAILING_FILE, *argv]
        pipe = subprocess.PIPE
        environment = {**environment, "FAILING_FILE": FAILING_FILE}
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def text_of(stream: str) -> str:
    return "".join(event["choices"][0]["text"] for event in events(stream) if event["choices"])


def ask_both(server: Server, step: int) -> tuple[str, str]:
    """Return the streams of a short and of a long prompt, which run at the same time."""
    bodies = SHORT, {**LONG, "prompt": prompt(1800, step)}
    with ThreadPoolExecutor(2) as pool:
        short, long = pool.map(lambda body: stream(server, body), bodies)
    return short, long


def stream(server: Server, body: dict[str, Any]) -> str:
    with server.post_raw(COMPLETIONS, body) as raw:
        raw.settimeout(120)
        answer = b""
        while b"[DONE]" not in answer and b'"error"' not in answer:
            if not (part := raw.recv(65536)):
                break
            answer += part
    return answer.decode()


def test_one_stream_ends_and_the_other_goes_on(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=0, **SIZES)
    faults = {"FAULTS": str(tmp_path)}
    with FailingServer(model, *OPTIONS, "--memory-budget", "64MiB", environment=faults) as refused:
        smallest = int(refused.wait_for(r"smallest budget that works is (\d+) MiB")[1])
    argv = (*OPTIONS, "--memory-budget", f"{smallest + 16}MiB")
    with FailingServer(model, *argv, environment=faults) as server:
        server.ready()
        expected = list(map(text_of, ask_both(server, 7)))
        assert server.metric("specdec_kv_written_bytes_total") > 0
        for name, number, words in (
            ("pwrite_from", errno.ENOSPC, "written: No space left on device"),
            ("pwrite_from", errno.EIO, "written: Input/output error"),
            ("pread_into", errno.EIO, "read: Input/output error"),
        ):
            (tmp_path / name).write_text(str(number))
            short, long = ask_both(server, 11 + number + len(name))  # none is in the prefix cache
            (tmp_path / name).unlink()
            assert text_of(short) == expected[0]
            assert '"error"' in long
            assert "the model failed; the server's log says why" in long
            server.wait_for(f"error: the KV file in .* cannot be {words}")
            assert server.get("/health")[0] == 200
        assert list(map(text_of, ask_both(server, 7))) == expected
