"""Streams of several users, with the engine in a process of its own and in the server's.

    python -m bench.checks.engine_process -m pair:target -md pair:draft --users 8

`specdec serve` has the first; the second shares one interpreter lock between the passes and the
HTTP side, everything else is the same. Both serve the same prompts in turns. Prints a table of
tokens/s of all users and of the time between two events of a stream, then one JSON line with
provenance.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NamedTuple

import typer

from bench.process.provenance import collect
from bench.prompts.workloads import BUILT_IN, read_prompts
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.cli.errors import run_app
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions
from specdec.serve.process.child import Process
from specdec.serve.router.share import ModelOptions

OWN, SHARED = "own process", "server's process"
_SECONDS = 120.0
_NO_TIMEOUT = 1e6

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class ServerFailed(SpecdecError):
    """A server did not answer."""


class Streams(NamedTuple):
    """Figures of one run. gaps: seconds between two events of a stream, of all streams."""

    num_tokens: int
    seconds: float
    gaps: list[float]


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")] = "pair:target",
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    users: Annotated[int, typer.Option("--users")] = 8,
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 256,
    n_runs: Annotated[int, typer.Option("--runs", help="Of each, in turns.")] = 3,
    port: Annotated[int, typer.Option("--port")] = 8951,
    shared_at: Annotated[int | None, typer.Option("--serve-shared", hidden=True)] = None,
) -> None:
    """Measure the streams of several users."""
    if shared_at is not None:
        serve_shared(model, draft_model, users, shared_at)
        return
    prompts = [item.text for item in read_prompts(BUILT_IN, users)]
    runs: dict[str, list[Streams]] = {OWN: [], SHARED: []}
    for _ in range(n_runs):
        for place, results in runs.items():
            with server(place, model, draft_model, users, port):
                stream_all(port, prompts, 8)  # its first passes allocate memory
                results.append(stream_all(port, prompts, max_tokens))
    typer.echo(text_of([table_of(runs)]))
    metrics = {
        place: [{"tokens_per_second": x.num_tokens / x.seconds, "p95": p95(x)} for x in results]
        for place, results in runs.items()
    }
    typer.echo(json.dumps({"runs": metrics, **collect(sys.argv)}))


def table_of(runs: Mapping[str, list[Streams]]) -> Table:
    rows = []
    for place, results in runs.items():
        speeds = [x.num_tokens / x.seconds for x in results]
        middle = statistics.median
        rows.append((place, f"{middle(speeds):.0f}", f"{1e3 * middle(map(p95, results)):.1f}"))
    return Table("Engine", ("", "tokens/s of all users", "p95 between events (ms)"), tuple(rows))


def p95(streams: Streams) -> float:
    """Return the 95th percentile of the seconds between events."""
    return statistics.quantiles(streams.gaps, n=20)[-1]


# --- clients -------------------------------------------------------------------------------------


def stream_all(port: int, prompts: list[str], max_tokens: int) -> Streams:
    """Stream all prompts at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(lambda text: _stream(port, text, max_tokens), prompts))
    gaps = [gap for _, own in results for gap in own]
    return Streams(sum(n for n, _ in results), time.perf_counter() - began, gaps)


def _stream(port: int, prompt: str, max_tokens: int) -> tuple[int, list[float]]:
    """Return the tokens of one stream, and the seconds between its events."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_SECONDS)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    times, num_tokens = list[float](), 0
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            if b'"completion_tokens"' in line:
                num_tokens = (json.loads(line[6:])["usage"] or {})["completion_tokens"]
    connection.close()
    if not num_tokens:
        raise ServerFailed(f"a stream of the server ended early ({response.status})")
    return num_tokens, [after - before for before, after in zip(times, times[1:], strict=False)]


# --- servers -------------------------------------------------------------------------------------


@contextmanager
def server(
    place: str, model: str, draft_model: str | None, users: int, port: int
) -> Iterator[None]:
    """Run a server until the block ends. Raises ServerFailed."""
    draft = ["-md", draft_model] if draft_model else []
    if place == OWN:
        argv = ["-m", "specdec", "serve", "-m", model, *draft, "--port", str(port)]
        argv += ["--parallel", str(users), *([] if draft else ["--spec-type", "none"])]
    else:
        argv = ["-m", "bench.checks.engine_process", "-m", model, *draft]
        argv += ["--users", str(users), "--serve-shared", str(port)]
    process = subprocess.Popen([sys.executable, *argv], stderr=subprocess.DEVNULL)
    try:
        _wait_until_ready(process, port)
        yield
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.1)
    raise ServerFailed(f"the server at port {port} is not ready after {_SECONDS:g} s")


class _ThreadedEngine:
    """The engine in a thread of the server's process, behind the same socket."""

    def __init__(self, load: RunOptions, options: ServeOptions, theirs: socket.socket) -> None:
        self._load, self._options = load, options
        self._descriptor = os.dup(theirs.fileno())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> int:
        self._thread.join()
        return 0

    def kill(self) -> None:
        """A thread cannot be killed: it ends with the process."""

    def _run(self) -> None:
        import specdec
        from specdec.serve.process.host import EngineHost
        from specdec.serve.process.messages import MessageSocket
        from specdec.serve.process.translation import Log

        load, messages = self._load, MessageSocket(self._descriptor)
        host = EngineHost(messages, self._options, Log(print))
        draft: dict[str, Any] = {"spec_type": "none"} if load.draft_model is None else {}
        try:
            with specdec.load(load.model, load.draft_model, parallel=load.parallel, **draft) as llm:
                host.run(llm)
        finally:
            messages.close()  # at which the server sees its end


def serve_shared(model: str, draft_model: str | None, users: int, port: int) -> None:
    """Serve with the engine in this process, until a signal comes."""
    from specdec.serve.run import Serving

    options = ServeOptions(port=port, engine_timeout=_NO_TIMEOUT)
    load = RunOptions(model, draft_model, parallel=users)

    def start(theirs: socket.socket, more: Mapping[str, str]) -> Process:
        return _ThreadedEngine(load, options, theirs)

    starter: Callable[[ModelOptions], Any] = lambda chosen: start  # noqa: E731
    Serving(options, [ModelOptions((model,), load)], None, [starter], print).run()
    os._exit(0)  # without waiting for the engine's thread


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.engine_process", sys.argv[1:]))
