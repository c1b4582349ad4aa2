"""Clients that go away at random moments: what do they leave behind?

python -m bench.serve.disconnects -m pair:target -md pair:draft -c 512
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
from contextlib import suppress

from bench.serve.server import ServerUnderTest, served

_PATH = "/v1/completions"
_AT_ONCE = 3
_SETTLE_SECONDS = 20.0
"""For threads and sockets that are ending."""


def disconnect(server: ServerUnderTest, n_clients: int, seed: int = 0) -> list[str]:
    """What is left of that many clients after they have gone; nothing is right.

    Half of them stream. They leave between the first byte of their request and some seconds after
    its last one.
    """
    chance = random.Random(seed)
    _leave(server, chance, 2 * _AT_ONCE)  # the first ones start threads that stay
    before = _held(server)
    _leave(server, chance, n_clients)
    end = time.monotonic() + _SETTLE_SECONDS
    while (left := _left(before, _held(server))) and time.monotonic() < end:
        time.sleep(0.2)
    return left + _blocked(server)


def _blocked(server: ServerUnderTest) -> list[str]:
    """What keeps a text from having all of the KV cache."""
    with server.open("/v1/models") as answer:
        n_tokens = json.load(answer)["data"][0]["max_model_len"]
    body = {"prompt": [1] * (n_tokens // 2), "max_tokens": n_tokens // 2 - 1, "ignore_eos": True}
    choice = server.post(_PATH, body)["choices"][0]
    return [] if choice["finish_reason"] == "length" else ["a text of the whole context was cut"]


def _leave(server: ServerUnderTest, chance: random.Random, n_clients: int) -> None:
    for first in range(0, n_clients, _AT_ONCE):
        clients = [_ask(server, chance) for _ in range(min(_AT_ONCE, n_clients - first))]
        for client in clients:
            time.sleep(chance.choice((0.0, 0.01, 0.1)) * chance.random())
            client.close()
        if chance.random() < 0.3:
            server.wait_until_idle()
    server.wait_until_idle()


def _ask(server: ServerUnderTest, chance: random.Random) -> socket.socket:
    """A client whose request has arrived in part, or wholly."""
    body = {"prompt": "x" * chance.randrange(1, 100), "max_tokens": 200, "ignore_eos": True}
    data = json.dumps({**body, "stream": chance.random() < 0.5, "n": chance.choice((1, 2))})
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
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


def _held(server: ServerUnderTest) -> dict[str, float]:
    process, figures = f"/proc/{server.pid}", server.figures()
    return {
        "threads": len(os.listdir(f"{process}/task")),
        "open files": len(os.listdir(f"{process}/fd")),
        "requests": figures["requests_inside"],
        "running texts": figures["texts_running"],
        "waiting texts": figures["texts_waiting"],
    }


def _left(before: dict[str, float], after: dict[str, float]) -> list[str]:
    grown = {name: n - before[name] for name, n in after.items() if n > before[name]}
    return [f"{n:g} more {name}" for name, n in grown.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked, options = parser.parse_known_args()
    with served(options) as server:
        left = disconnect(server, asked.clients, asked.seed)
    print(json.dumps({"clients": asked.clients, "seed": asked.seed, "left": left}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
