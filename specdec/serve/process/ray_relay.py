"""The far side of an engine on another machine: a Ray actor beside its process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from offload.errors import SpecdecError
from specdec.cluster.machines import check_same
from specdec.serve.process.child import EngineTask, Start, with_task

CHUNK_BYTES = 1 << 16
"""Ray sends values of less than 100 kB with the call itself, larger ones by its object store."""
_MAX_ITEMS = 64
_LAST_LINES_SECONDS = 1.0

Item = bytes | str | int
"""Bytes that the engine sent, a line of its stderr, or its exit code at the end."""


@dataclass(frozen=True)
class RemoteTask:
    """An engine on another machine.

    make_start: returns, there, the function that starts a process whose stderr is a pipe.
    version, weights: see `check_same`. model: its name as it was given.
    """

    make_start: Callable[[], Start]
    engine: EngineTask
    version: str
    weights: str | None
    model: str


class EngineRelay:
    """Actor that runs an engine's process, and passes on the bytes of its socket.

    Its methods are called by two threads of the server: `write` by one, the others by the other.
    """

    def __init__(self) -> None:
        self._items: Queue[Item] = Queue(_MAX_ITEMS)
        self._socket, self._theirs = socket.socketpair()

    def start(self, task: RemoteTask) -> str | None:
        """Start the process; return what is wrong with this machine, or None."""
        try:
            check_same(task.version, task.engine.load.model, task.weights, task.model)
        except SpecdecError as error:
            return str(error)
        start = with_task(task.make_start(), task.engine, shares_budget=True)
        # The kernel kills the process once the thread that started it has ended.
        threading.Thread(target=self._run, args=(start,), daemon=True).start()
        return None

    def write(self, data: bytes) -> None:
        """Send bytes to the engine; none at all tell it to end."""
        try:
            if data:
                self._socket.sendall(data)
            else:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended, which `read` tells

    def read(self) -> list[Item]:
        """Wait for items, and return those that there are."""
        items = [self._items.get()]
        num_bytes = _size(items[0])
        while num_bytes < CHUNK_BYTES // 2:
            try:
                items.append(self._items.get_nowait())
            except Empty:
                break
            num_bytes += _size(items[-1])
        return items

    def _run(self, start: Start) -> None:
        with self._theirs:
            try:
                process: Any = start(self._theirs, {})
            except OSError as error:
                self._items.put(f"error: the engine cannot be started: {error.strerror or error}")
                self._items.put(1)
                return
        receiver = threading.Thread(target=self._receive, daemon=True)
        listener = threading.Thread(target=self._listen, args=(process.stderr,), daemon=True)
        receiver.start()
        listener.start()
        code = process.wait()
        receiver.join()
        listener.join(_LAST_LINES_SECONDS)  # a child of it may have the pipe open
        self._items.put(code)

    def _receive(self) -> None:
        try:
            while data := self._socket.recv(CHUNK_BYTES // 2):
                self._items.put(data)
        except OSError:
            pass

    def _listen(self, stderr: Any) -> None:
        for line in stderr:
            self._items.put(line[:CHUNK_BYTES].decode(errors="replace").rstrip())


def _size(item: Item) -> int:
    return len(item) if isinstance(item, bytes | str) else 0
