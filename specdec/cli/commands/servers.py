"""`specdec ps` and `specdec stop`: the running servers of this user."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated

import typer

from offload.units import format_bytes
from specdec.cli import options
from specdec.cli.output import say_hint, write_json, write_text
from specdec.serve.running.records import ServerRecord, running_servers, wait_until_ended

_PATIENCE_SECONDS = 2.0
_COLUMNS = ("PID", "MODEL", "ADDRESS", "BUDGET", "UP", "STATE")

Name = Annotated[
    str | None,
    typer.Argument(
        help="A model's name or a process number, as `specdec ps` lists them.", show_default=False
    ),
]
All = Annotated[bool, typer.Option("--all", help="Stop every server.")]


def ps(json: options.Json = False, debug: options.Debug = False) -> None:
    """List your running servers on this machine."""
    servers = running_servers()
    with ThreadPoolExecutor(16) as pool:
        states = list(pool.map(ServerRecord.state, servers))
    now = time.time()
    if json:
        items = [
            {**asdict(server), "seconds": max(now - server.started_at, 0.0), "state": state}
            for server, state in zip(servers, states, strict=True)
        ]
        write_json({"servers": items})
        return
    if not servers:
        write_text("no server is running\n")
        return
    rows = [_row(server, state, now) for server, state in zip(servers, states, strict=True)]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    for row in (_COLUMNS, *rows):
        cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
        write_text("  ".join(cells).rstrip() + "\n")


def stop(server: Name = None, all: All = False, debug: options.Debug = False) -> None:
    """Stop a server once its running requests have ended. Stop it again to end it at once."""
    if all and server is not None:
        raise options.OptionError(f"name one server or give --all, not both: {server}, --all")
    chosen = _chosen(running_servers(), server, all)
    if not chosen:
        write_text("no server is running\n")
    for item in chosen:
        item.stop()
    if not wait_until_ended(chosen, _PATIENCE_SECONDS):
        say_hint("waiting for running requests to end; a second `specdec stop` ends them at once")
        wait_until_ended(chosen, float("inf"))
    for item in chosen:
        write_text(f"stopped {item.names[0]} ({item.pid})\n")


def _chosen(servers: Sequence[ServerRecord], name: str | None, all: bool) -> list[ServerRecord]:
    """Return the servers to stop: one unless `all`. Raises OptionError."""
    if all:
        return list(servers)
    matching = [item for item in servers if name is None or str(item.pid) == name]
    matching = matching or [item for item in servers if name in item.names]
    if len(matching) == 1:
        return matching
    if not servers:
        raise options.OptionError("no server is running")
    listed = ", ".join(f"{item.pid} ({item.names[0]})" for item in matching or servers)
    if matching:
        raise options.OptionError(f"{len(matching)} servers match: give one of {listed}, or --all")
    raise options.OptionError(f"no server is called {name!r}: running are {listed}")


def _row(server: ServerRecord, state: str, now: float) -> tuple[str, ...]:
    budget = "" if server.budget_bytes is None else format_bytes(server.budget_bytes)
    names, age = ",".join(server.names), _age(max(now - server.started_at, 0.0))
    return str(server.pid), names, server.url, budget, age, state


def _age(seconds: float) -> str:
    """Return a time in its two largest units: 3 d 4 h, 5 min 6 s."""
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    rest, parts = int(seconds), []
    for name, size in units:
        n, rest = divmod(rest, size)
        parts.append((n, name))
    first = next((i for i, (n, _) in enumerate(parts) if n), len(parts) - 1)
    return " ".join(f"{n} {name}" for n, name in parts[first : first + 2])
