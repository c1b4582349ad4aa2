"""Clients that disconnect at random moments, and the server's resources afterwards."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import time
from contextlib import suppress

from serving import COMPLETIONS, Server

N_AT_ONCE = 3
REST_SECONDS = 20.0
"""Time for threads and sockets to end."""
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads that the event loop's pool may have in the end: it starts one if none is idle."""
GAUGE = re.compile(r"^specdec_(\w+_(?:inside|running|waiting)) (\S+)$", re.MULTILINE)
"""Metrics of resources that the server holds at the moment."""


def disconnect(server: Server, n_clients: int, seed: int = 0) -> dict[str, float]:
    """Return by how much each of `usage` has grown after many clients have disconnected.

    Half of them stream. They leave between the first byte of their request and some seconds after
    its last one.
    """
    chance = random.Random(seed)
    leave(server, chance, 4 * N_AT_ONCE)  # the first ones start threads that stay
    before = usage(server)
    leave(server, chance, n_clients)
    end = time.monotonic() + REST_SECONDS
    while (grown := growth(before, usage(server))) and time.monotonic() < end:
        time.sleep(0.2)
    return grown


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    allowed = {"threads": POOL_THREADS}
    return {
        name: n - before[name]
        for name, n in after.items()
        if n > before[name] + allowed.get(name, 0)
    }


def leave(server: Server, chance: random.Random, n_clients: int) -> None:
    for first in range(0, n_clients, N_AT_ONCE):
        clients = [ask(server, chance) for _ in range(min(N_AT_ONCE, n_clients - first))]
        for client in clients:
            time.sleep(chance.choice((0.0, 0.01, 0.1)) * chance.random())
            client.close()
        if chance.random() < 0.3:
            server.wait_until_free()
    server.wait_until_free()


def ask(server: Server, chance: random.Random) -> socket.socket:
    """Return a client whose request has been received in part, or wholly."""
    body = {"prompt": "x" * chance.randrange(1, 100), "max_tokens": 200, "ignore_eos": True}
    data = json.dumps({**body, "stream": chance.random() < 0.5, "n": chance.choice((1, 2))})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n{data}".encode()
    if chance.random() < 0.1:
        request = request[: chance.randrange(1, len(request))]
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall(request)
    if chance.random() < 0.3:
        client.settimeout(0.5 * chance.random() + 0.001)
        with suppress(TimeoutError):
            client.recv(256)
    return client


def usage(server: Server) -> dict[str, float]:
    """Return the numbers of threads and open files, and the server's gauges of requests."""
    process = f"/proc/{server.process.pid}"
    gauges = {name: float(value) for name, value in GAUGE.findall(server.get("/metrics")[1])}
    assert "requests_inside" in gauges
    return {
        "threads": len(os.listdir(f"{process}/task")),
        "open files": len(os.listdir(f"{process}/fd")),
        **gauges,
    }
