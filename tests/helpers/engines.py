"""The engine of a server: its process, and one that a test plays."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from serving import Server

from specdec.metrics.stats import EngineStats
from specdec.run_options import RunOptions
from specdec.serve.process.child import ProcessRefused
from specdec.serve.process.client import EngineClient
from specdec.serve.process.messages import Beat, Loaded, MessageSocket, ServedModel, ServerGone
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import ModelOptions, Starter

MODEL = ServedModel({"memory_budget_bytes": 1}, 64, 1, False, False, "", "", "")


def children(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    pids: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # the thread has ended
            pids += map(int, (task / "children").read_text().split())
    return pids


def engine_of(server: Server) -> int:
    """Return the process id of a server's engine."""
    (pid,) = children(server.process.pid)
    return pid


def wait_until_gone(pid: int, seconds: float = 30) -> None:
    """Wait until there is no such process, or only its exit status."""
    end = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < end, f"{pid} is still there"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return status.split()[0] not in "ZX"


class PlayedEngine:
    """A process whose part a thread of the test plays: `play` gets its socket, and its end is the
    process's."""

    def __init__(self, play: Callable[[PlayedEngine], int], theirs: socket.socket) -> None:
        self.socket = MessageSocket(os.dup(theirs.fileno()))
        self.is_killed = threading.Event()
        self._code = 0
        self._refusal: ProcessRefused | None = None
        self._thread = threading.Thread(target=self._run, args=(play,), daemon=True)
        self._thread.start()

    def _run(self, play: Callable[[PlayedEngine], int]) -> None:
        with suppress(ServerGone):  # it has ended first
            try:
                self._code = play(self)
            except ProcessRefused as error:
                self._refusal = error
        self.socket.close()

    def load(self) -> None:
        self.socket.send(Loaded(MODEL))

    def beat(self, seconds: float) -> None:
        """Give signs of life for some time, or until it is killed."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.is_killed.wait(0.02):
            self.socket.send(Beat(EngineStats(), 0))

    def wait(self) -> int:
        self._thread.join()
        if self._refusal is not None:
            raise self._refusal
        return -signal.SIGKILL if self.is_killed.is_set() else self._code

    def kill(self) -> None:
        self.is_killed.set()


def router_of_one(*, is_loaded: bool = True) -> ModelRouter:
    """Return a router of one model "m", whose engine takes requests and does nothing."""
    options = ModelOptions(("m",), RunOptions("m"))
    runner = ModelRunner(options, [model_starter(lambda engine: 0)], print, 4.0)
    if is_loaded:
        client = EngineClient(lambda: None)
        client.model = MODEL
        (replica,) = runner.replicas
        replica.open(client)
    return ModelRouter([runner])


def played(*plays: Callable[[PlayedEngine], int]) -> Callable[..., Any]:
    """Return a function that starts one engine after the other; the last one again and again."""
    rest = list(plays)

    def start(theirs: socket.socket, more: Mapping[str, str]) -> PlayedEngine:
        return PlayedEngine(rest.pop(0) if len(rest) > 1 else rest[0], theirs)

    return start


def model_starter(*plays: Callable[[PlayedEngine], int]) -> Starter:
    """Return a function that returns `played`, for any options of a model."""
    start = played(*plays)
    return lambda options: start
