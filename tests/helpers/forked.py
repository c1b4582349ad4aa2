"""Modules run as programs in forks of one process, so that they start at no cost. It has imported
torch, transformers and the server.

The start and exit of an interpreter are left out: tests of those start their own. The engine of a
server is a fork of the server's process in the same way.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
_CONTEXT = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.helpers.forked_imports"])


def _run(argv: Sequence[str], environment: Mapping[str, str], *streams: Connection) -> None:
    """Run `python -m argv...`."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), str(ROOT)]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(argv)
    _fork_engines()
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _fork_engines() -> None:
    """Let a server of this process fork its engine."""
    if "specdec.serve.run" in sys.modules:
        import specdec.cli.commands.serve as command

        command.starter = lambda argv, _: partial(_ForkedEngine, argv[3:])


class _ForkedEngine:
    """The members of subprocess.Popen that a supervisor uses. argv: of the command line."""

    def __init__(self, argv: Sequence[str], theirs: Any, more: Mapping[str, str]) -> None:
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            code = 1
            try:
                number = theirs.fileno()
                os.closerange(3, number)
                os.closerange(number + 1, 1 << 16)
                code = _engine_code(argv, parent, more)
            finally:
                os._exit(code)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def _engine_code(argv: Sequence[str], parent: int, more: Mapping[str, str]) -> int:
    from offload.process.enter import die_with
    from specdec.cli.entry import main

    signal.set_wakeup_fd(-1)  # the server's loop had set it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with(parent)
    os.environ.update(more)
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _start(argv: Sequence[str], environment: Mapping[str, str], *streams: Connection) -> Any:
    args = (argv, {**environment, "OMP_NUM_THREADS": "1"}, *streams)
    process = _CONTEXT.Process(target=_run, args=args, daemon=True)
    process.start()
    for stream in streams:
        stream.close()
    return process


def run_forked(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of `python -m argv...`, which shares our stdout and stderr."""
    process = _start(argv, environment, *(Connection(os.dup(n), readable=False) for n in (1, 2)))
    process.join()
    code: int = process.exitcode
    return code if code >= 0 else 128 - code


class ForkedProcess:
    """The members of subprocess.Popen that tests use, for `python -m argv...`."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], text: bool) -> None:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(2)]
        self._process = _start(argv, environment, *(end for _, end in pipes))
        self.stdout, self.stderr = (_opened(ours, text) for ours, _ in pipes)

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired("specdec", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        actual: dict[str, Any] = {}
        readers = [
            Thread(target=lambda n=name, s=stream: actual.update({n: s.read()}), daemon=True)
            for name, stream in (("out", self.stdout), ("err", self.stderr))
            if not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return actual.get("out"), actual.get("err")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _opened(ours: Connection, text: bool) -> IO[Any]:
    with ours:
        return os.fdopen(os.dup(ours.fileno()), "r" if text else "rb")
