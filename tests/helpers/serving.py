"""`specdec serve` in tests: a server in a subprocess, and one in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import ForkedProcess

ROOT = Path(__file__).resolve().parents[2]
JSON = {"Content-Type": "application/json"}

LONG = {"prompt": "x", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}
COMPLETIONS = "/v1/completions"
SMALL = ("--spec-type", "none", "-c", "512", "--max-queue", "3", "--drain-timeout", "30")
"""Options for three concurrent requests whose sequences take a while."""

AnyProcess = ForkedProcess | subprocess.Popen[str]


class Server:
    """A server of a model, from its start to the end of a `with` block."""

    def __init__(self, model: Path | str, *more: str, environment: dict[str, str] | None = None):
        argv = ["serve", "-m", str(model), "--threads", "1", "--port", "0", *more]
        self.process = self._start(argv, {**os.environ, **(environment or {})})
        self.lines: list[str] = []
        self._reported = threading.Condition()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _start(self, argv: list[str], environment: dict[str, str]) -> AnyProcess:
        return ForkedProcess(["specdec", *argv], environment, text=True)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._reported:
                self.lines.append(line)
                self._reported.notify_all()

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Return the first line of stderr that matches."""
        end = time.monotonic() + seconds
        with self._reported:
            while True:
                for line in self.lines:
                    if actual := re.search(pattern, line):
                        return actual
                if (
                    not self._reported.wait(end - time.monotonic())
                    or self.process.poll() is not None
                ):
                    raise AssertionError(f"no line like {pattern!r} in {self.lines}")

    @property
    def url(self) -> str:
        return self.wait_for(r"(http://\S+)/health")[1]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def ready(self) -> Server:
        self.wait_for("ready: ")
        return self

    def code(self) -> int:
        """Wait for the end of the process and of its stderr; return the exit code."""
        code = self.process.wait(120)
        self._listener.join(60)
        return code

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        return ask(urllib.request.Request(self.url + path, headers=headers or {}))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {**JSON, **(headers or {})})
        status, text = ask(request)
        return status, json.loads(text)

    def connect(self, *lines: str, body: bytes = b"") -> socket.socket:
        """Return a raw connection with these bytes sent on it."""
        raw = socket.create_connection(("127.0.0.1", self.port), 30)
        raw.sendall("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + body)
        return raw

    def post_raw(self, path: str, body: Any) -> socket.socket:
        """Send a request without reading its answer."""
        data = json.dumps(body).encode()
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        return self.connect(*head, f"Content-Length: {len(data)}", body=data)

    def metric(self, name: str) -> float:
        _, text = self.get("/metrics")
        return float(re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)[1])

    def wait_until_free(self, seconds: float = 30) -> None:
        """Wait until no request is in progress."""
        end = time.monotonic() + seconds
        while self.metric("specdec_requests_inside"):
            assert time.monotonic() < end, "a request is still inside"
            time.sleep(0.05)


class OwnServer(Server):
    """A server in its own interpreter, which starts and exits as a user's does."""

    def _start(self, argv: list[str], environment: dict[str, str]) -> AnyProcess:
        return subprocess.Popen(
            [sys.executable, "-m", "specdec", *argv],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def begun(server: Server, **more: Any) -> socket.socket:
    """Return a stream whose first text has arrived."""
    raw = server.post_raw(COMPLETIONS, {**LONG, "stream": True, **more})
    raw.settimeout(60)
    answer = b""
    while b'"text"' not in answer:
        answer += raw.recv(65536)
    return raw


def ask(request: urllib.request.Request) -> tuple[int, str]:
    """Return status and text, also of errors."""
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def events(text: str) -> Sequence[Any]:
    """Return the values of a stream of events, without its end."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]
