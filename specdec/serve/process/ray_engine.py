"""The near side of engines on other machines: which machines, and each as a process."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from specdec import __version__
from specdec.cluster.connection import ClusterError, connected, first_line, last_line
from specdec.cluster.machines import Machine, machines_of
from specdec.metrics.stats import EngineStats
from specdec.serve.process.child import Process, ProcessLost, ProcessRefused, Start
from specdec.serve.process.messages import Beat, frame
from specdec.serve.process.ray_relay import CHUNK_BYTES, EngineRelay, RemoteTask

_POLL_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0
"""Time after which a replica that waits for its machine says so."""


class Machines:
    """The machines of a cluster, each with one replica at most.

    num_replicas: number of replicas; None: one on each machine.

    Raises ClusterError if there are fewer machines.
    """

    def __init__(self, ray: Any, num_replicas: int | None) -> None:
        machines = machines_of(ray)
        if num_replicas is not None and num_replicas > len(machines):
            raise ClusterError(
                f"--replicas is {num_replicas}, but the Ray cluster has {len(machines)} machines "
                "with a processor, and each runs one engine: add machines with `ray start "
                f"--address ...`, or give --replicas {len(machines)}"
            )
        self.ray = ray
        self._machines = dict(enumerate(machines[:num_replicas], 1))
        self._lock = threading.Lock()

    @property
    def replicas(self) -> tuple[int, ...]:
        """Numbers of the replicas, from 1."""
        return tuple(self._machines)

    def acquire(self, replica: int) -> Machine | None:
        """Return the machine of a replica: the last one, or if that is gone a free one; None if
        there is none."""
        with self._lock:
            try:
                machines = machines_of(self.ray)
            except ClusterError:
                return None
            if self._machines[replica] not in machines:
                free = [item for item in machines if item not in self._machines.values()]
                if not free:
                    return None
                self._machines[replica] = free[0]
            return self._machines[replica]


@contextmanager
def open_machines(address: str, num_replicas: int | None) -> Iterator[Machines]:
    """Connect to a cluster; see `connected`, `Machines`. Raises ClusterError."""
    with connected(address) as ray:
        yield Machines(ray, num_replicas)


def ray_start(
    machines: Machines, replica: int, task: RemoteTask, say: Callable[[str], None]
) -> Start:
    """Return a function that starts an engine on the machine of a replica.

    say: takes the lines that it prints, and those about its machine.
    """

    def start(theirs: socket.socket, more: Mapping[str, str]) -> Process:
        return RayEngine(machines, replica, task, theirs, say)

    return start


class _Ended(Exception):
    """The engine was killed, or the server has ended, before the engine began."""


class RayEngine:
    """An engine's process on another machine: its messages are relayed from and to a socket here.

    theirs: the engine's end of the socket, which is duplicated.
    """

    def __init__(
        self,
        machines: Machines,
        replica: int,
        task: RemoteTask,
        theirs: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self._machines, self._ray = machines, machines.ray
        self._replica, self._task = replica, task
        self._socket, self._say_line = theirs.dup(), say
        self._actor: Any = None
        self._is_killed = threading.Event()
        self._code, self._lost = -signal.SIGKILL, ""
        self._is_refused = False
        name = f"specdec-replica-{replica}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> int:
        """Return its exit code once it has ended. Raises ProcessLost and ProcessRefused."""
        self._thread.join()
        if self._is_refused:
            raise ProcessRefused
        if self._lost and not self._is_killed.is_set():
            raise ProcessLost(self._lost)
        return self._code

    def kill(self) -> None:
        """Kill it, or give up to start it."""
        self._is_killed.set()
        self._end_actor()

    def _end_actor(self) -> None:
        if self._actor is not None:
            with suppress(Exception):  # Ray raises various errors if it is gone already
                self._ray.kill(self._actor)

    def _say(self, line: str) -> None:
        self._say_line(f"replica {self._replica}: {line}")

    def _run(self) -> None:
        try:
            machine = self._waited_machine()
            if self._has_begun(machine):
                threading.Thread(target=self._write, daemon=True).start()
                self._read()
        except (_Ended, OSError):
            pass
        except self._ray.exceptions.RayActorError as error:
            self._note_death(str(error))
        except Exception as error:  # Ray raises many kinds where the cluster has ended
            self._lost = f"{type(error).__name__}: {first_line(str(error))}"
        finally:
            self._end_actor()
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that writes
            self._socket.close()

    def _note_death(self, reason: str) -> None:
        if "creation task" in reason:
            self._say(
                f"error: no engine can begin there: {last_line(reason)}; install specdec "
                f"{__version__} for the Python that runs Ray there"
            )
            self._is_refused = True
        else:
            self._lost = first_line(reason)

    # --- the beginning -------------------------------------------------------------------------

    def _waited_machine(self) -> Machine:
        """Return the replica's machine, once there is one."""
        machine = self._machines.acquire(self._replica)
        if machine is None:
            self._say("its machine is gone, and no other one is free: it waits for one")
        while machine is None:
            self._pause()
            machine = self._machines.acquire(self._replica)
        self._say(f"its machine is {machine.name}")
        return machine

    def _has_begun(self, machine: Machine) -> bool:
        """Return whether the process was started; say why not."""
        options = machine.actor_options(machine.n_cpus, is_soft=False)
        self._actor = self._ray.remote(EngineRelay).options(**options, max_concurrency=2).remote()
        begun = self._actor.start.remote(self._task)
        num_polls = 0
        while not self._ray.wait([begun], timeout=_POLL_SECONDS)[0]:
            self._tell_alive()
            num_polls += 1
            if num_polls == _PATIENCE_SECONDS / _POLL_SECONDS:
                self._say(f"it waits until Ray gives it the processors of {machine.name}")
        problem = self._ray.get(begun)
        if self._is_killed.is_set():
            raise _Ended
        if problem is None:
            return True
        self._say(f"error: on {machine.name}: {problem}")
        self._is_refused = True
        return False

    def _pause(self) -> None:
        self._tell_alive()
        self._is_killed.wait(_POLL_SECONDS)

    def _tell_alive(self) -> None:
        """Give a sign of life while there is no process yet that could. Raises _Ended."""
        if self._is_killed.is_set():
            raise _Ended
        self._socket.sendall(frame(Beat(EngineStats(), 0)))

    # --- messages ------------------------------------------------------------------------------

    def _read(self) -> None:
        """Pass on what the engine sends, until it has ended."""
        while True:
            for item in self._ray.get(self._actor.read.remote()):
                if isinstance(item, bytes):
                    self._socket.sendall(item)
                elif isinstance(item, str):
                    self._say(item.removeprefix("specdec: "))
                else:
                    self._code = item
                    return

    def _write(self) -> None:
        """Pass on what the server sends, and that it sends no more."""
        with suppress(Exception):  # what is wrong shows where messages are read
            data = b"-"
            while data:
                data = self._socket.recv(CHUNK_BYTES)
                self._ray.get(self._actor.write.remote(data))
