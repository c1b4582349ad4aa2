"""The engine's process, as the server starts and ends it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offload.process.cgroup import tied_argv
from specdec.run_options import RunOptions
from specdec.serve.options import ServeOptions

ENGINE_VARIABLE = "SPECDEC_ENGINE"
"""Environment variable that makes `specdec serve` the engine of a server: the number of its socket,
and the resident bytes of the server's process."""
TASK_VARIABLE = "SPECDEC_ENGINE_TASK"
"""Environment variable with the engine's task, pickled: an EngineTask, or models to plan."""


@dataclass(frozen=True)
class EngineTask:
    """Options of an engine. load: to load the model with. server: limits of requests."""

    load: RunOptions
    server: ServeOptions


class ProcessLost(Exception):
    """Nobody knows how a process on another machine has ended; the text says what is known."""


class ProcessRefused(Exception):
    """A machine cannot run the process, which its operator was told with the reason."""


class Process(Protocol):
    """The members of subprocess.Popen that a supervisor uses; `wait` may raise ProcessLost, and
    ProcessRefused."""

    def wait(self) -> int: ...

    def kill(self) -> None: ...


Start = Callable[[socket.socket, Mapping[str, str]], Process]
"""Starts the engine's process with (its end of the socket, variables to add to the environment)."""


def starter(
    argv: Sequence[str], environment: Mapping[str, str], stderr: int | None = None
) -> Start:
    """Return a function that starts `argv` so that the kernel kills it as soon as the calling
    thread, the server's main one, has ended. stderr: subprocess's."""

    def start(theirs: socket.socket, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Ctrl-C of a terminal reaches it too, and is ignored there.
        return subprocess.Popen(
            tied_argv(argv),
            env={**environment, **more},
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
        )

    return start


def engine_marker(theirs: socket.socket, resident_bytes: int) -> dict[str, str]:
    return {ENGINE_VARIABLE: f"{theirs.fileno()}:{resident_bytes}"}


def with_task(start: Start, task: Any, *, shares_budget: bool = False) -> Start:
    """Return a function that starts a process which finds `task` there: see `take_task`.

    shares_budget: whether the server's memory is counted outside of this process's budget.
    """
    data = b64encode(pickle.dumps(task)).decode("ascii")

    def started(theirs: socket.socket, more: Mapping[str, str]) -> Process:
        marker = engine_marker(theirs, 0) if shares_budget else {}
        return start(theirs, {**more, **marker, TASK_VARIABLE: data})

    return started


def take_task() -> Any:
    """Return what the server's process gave us to do. Our own children do not see it."""
    return pickle.loads(b64decode(os.environ.pop(TASK_VARIABLE)))  # noqa: S301  # of our parent


def take_marker() -> tuple[int, int] | None:
    """Return (number of the socket, resident bytes of the server's process) in the engine's
    process, and None in any other. Our own children do not see the variable."""
    number, _, n_bytes = os.environ.pop(ENGINE_VARIABLE, "").partition(":")
    if not number:
        return None
    os.set_inheritable(int(number), False)
    return int(number), int(n_bytes)


def described_exit(code: int) -> str:
    """Return how a process ended, from subprocess's code: -n for signal n."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = ", as when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{cause}"
