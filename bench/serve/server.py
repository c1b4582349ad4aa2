"""One `specdec serve` in a process of its own, and what it says of itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

_READY = re.compile(r"ready: .* at (http://\S+)/v1$")
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class ServerUnderTest:
    url: str
    pid: int

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def open(self, path: str, body: Any = None) -> IO[bytes]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, _JSON)
        answer: IO[bytes] = urllib.request.urlopen(request, timeout=3600)
        return answer

    def post(self, path: str, body: Any) -> Any:
        with self.open(path, body) as answer:
            return json.load(answer)

    def figures(self) -> dict[str, float]:
        """All of /metrics that have no label."""
        with self.open("/metrics") as answer:
            lines = answer.read().decode().splitlines()
        pairs = (line.split(" ") for line in lines if line[:1] != "#" and "{" not in line)
        return {name.removeprefix("specdec_"): float(value) for name, value in pairs}

    def wait_until_idle(self, seconds: float = 600.0) -> dict[str, float]:
        """The figures once nobody is inside. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while True:
            found = self.figures()
            if not any(found[name] for name in ("requests_inside", "texts_running")):
                return found
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds:g} s a request is still inside")
            time.sleep(0.05)


@contextmanager
def served(options: Sequence[str]) -> Iterator[ServerUnderTest]:
    """Options as of `specdec serve`, the port left out. Raises RuntimeError with what it said."""
    argv = [sys.executable, "-m", "specdec", "serve", "--port", "0", *options]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := _READY.search(line.rstrip()):
                yield ServerUnderTest(found[1], process.pid)
                break
        else:
            raise RuntimeError("the server did not start: " + "".join(lines))
    finally:
        process.terminate()
        process.wait()
        process.stderr.close()
