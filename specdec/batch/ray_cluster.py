"""Batch on several machines by Ray: assignment of lines to workers, and recovery of dead workers.

Actors are handed single lines. Ray Data's `map_batches` is not used: it returns a batch at a time,
so that passes have fewer and fewer tokens towards the end of each batch, and a killed worker loses
finished answers. Here each answer is stored as soon as it is finished, by the same journal as on
one machine; the lines that a dead worker had in hand go to the others.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from offload.distribution import install_command
from offload.units import MIB
from specdec import __version__
from specdec.batch.answering import Answered
from specdec.batch.lines import BatchError, Line
from specdec.batch.ray_worker import Ended, Failed, Reported, Requested, Worker
from specdec.batch.request import Rules
from specdec.batch.run import Answerer
from specdec.metrics.stats import EngineStats, sum_of
from specdec.run_options import RunOptions

AUTO = "auto"
MAX_DEATHS = 3
"""Deaths in a row, without an answer in between, after which a worker is not started again."""
_OBJECT_STORE_BYTES = 80 * MIB
"""Object store size, near Ray's minimum: lines are small, and its default is 1/3 of the memory."""
_CONNECT_SECONDS = 5.0

logger = logging.getLogger(__name__)


@dataclass
class Place:
    """Location of one worker, and the lines that it has in hand."""

    node_id: str
    machine: str
    n_cpus: int
    actor: Any = None
    in_hand: dict[int, Line] = field(default_factory=dict)
    stats: EngineStats = EngineStats()
    """Engine metrics as of its last answer."""
    n_deaths: int = 0
    """Deaths since its last answer."""


@contextmanager
def open_cluster(
    address: str, n_workers: int | None, load: RunOptions, rules: Rules
) -> Iterator[Answerer]:
    """Start workers on the machines of a Ray cluster and yield their answerer.

    Args:
        address: cluster address; AUTO: the one that runs on this machine, else a temporary one of
            this machine alone.
        n_workers: number of workers; None: one on each machine. More of them share the machines.

    Raises BatchError if there is no Ray, or no cluster.
    """
    ray = _import_ray()
    draft = None if load.draft_model is None else _absolute(load.draft_model)
    load = replace(load, model=_absolute(load.model), draft_model=draft)
    _connect(ray, address)
    cluster = Cluster(ray, load, rules)
    try:
        cluster.places = _places(ray, n_workers)
        yield cluster.answer
    finally:
        cluster.close()
        ray.shutdown()


class Cluster:
    """Dispatcher of lines to workers, and receiver of their answers."""

    def __init__(self, ray: Any, load: RunOptions, rules: Rules) -> None:
        self._ray, self._worker = ray, ray.remote(Worker)
        self._arguments = (load, rules, __version__)
        self.places: list[Place] = []
        self._asked: dict[Any, Place] = {}
        """Pending calls, and the worker of each."""
        self._stats_of_dead: list[EngineStats] = []
        self._idle: list[Place] = []
        self._given_back: deque[Line] = deque()

    def answer(self, lines: Iterator[Line], answered: Answered) -> EngineStats:
        """Answer all lines; see `Answerer`."""
        for place in self.places:
            self._start(place)
        is_at_end = False
        while not is_at_end or self._given_back or any(place.in_hand for place in self.places):
            place, said = self._next_said()
            if isinstance(said, Reported):
                place.n_deaths, place.stats = 0, said.stats
                del place.in_hand[said.answer.key.number]
                answered(said.answer)
                self._ask(place, place.actor.go_on)
            elif isinstance(said, Requested):
                line = self._given_back.popleft() if self._given_back else next(lines, None)
                is_at_end = is_at_end or line is None
                if line is not None:
                    place.in_hand[line.number] = line
                self._ask(place, place.actor.give, line)
            elif isinstance(said, Ended):
                self._idle.append(place)
                self._wake()
            elif isinstance(said, Failed):
                raise BatchError(f"on {place.machine}: {said.message}")
        return sum_of((*self._stats_of_dead, *(place.stats for place in self.places)))

    def _next_said(self) -> tuple[Place, object]:
        """Return the next message of any worker, and that worker; None as message of a dead one.

        Raises BatchError if a worker cannot start: another one could not either.
        """
        (ready, *_), _ = self._ray.wait(list(self._asked), num_returns=1)
        place = self._asked.pop(ready)
        try:
            return place, self._ray.get(ready)
        except self._ray.exceptions.RayActorError as error:
            if "creation task" in str(error):
                raise BatchError(
                    f"on {place.machine} no worker can begin: {_last_line(str(error))}; install "
                    f"specdec {__version__} for the Python that runs Ray there"
                ) from error
            self._bury(place, str(error))
            return place, None

    def _bury(self, place: Place, reason: str) -> None:
        """Return the lines of a dead worker to the queue, and start another in its place."""
        lost = list(place.in_hand.values())
        self._given_back.extendleft(reversed(lost))
        self._stats_of_dead.append(place.stats)
        place.in_hand, place.stats = {}, EngineStats()
        place.n_deaths += 1
        problem = f"a worker on {place.machine} ended ({_first_line(reason)})"
        if place.n_deaths < MAX_DEATHS:
            logger.warning("%s: its %d lines are given out again", problem, len(lost))
            self._start(place)
        else:
            self._kill(place)
            self.places.remove(place)
            if not self.places:
                numbers = ", ".join(str(line.number) for line in lost[:5])
                raise BatchError(
                    f"{problem}, {MAX_DEATHS} times without an answer between them, and no other "
                    f"is left: give it more memory, or look at lines {numbers or 'yet to be read'}"
                )
            logger.warning("%s %d times: it is not started again", problem, MAX_DEATHS)
        self._wake()

    def _wake(self) -> None:
        """Restart idle workers if lines of a dead one were given back."""
        if self._given_back:
            for place in self._idle:
                self._ask(place, place.actor.start)
            self._idle = []

    def _start(self, place: Place) -> None:
        """Start a worker process on its machine, or elsewhere (soft) if that is gone."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._kill(place)
        where = NodeAffinitySchedulingStrategy(place.node_id, soft=True)
        options = {"num_cpus": place.n_cpus, "scheduling_strategy": where, "max_restarts": 0}
        place.actor = self._worker.options(**options).remote(*self._arguments)
        self._ask(place, place.actor.start)

    def _ask(self, place: Place, method: Any, *arguments: object) -> None:
        self._asked[method.remote(*arguments)] = place

    def _kill(self, place: Place) -> None:
        if place.actor is not None:
            with suppress(Exception):  # Ray raises various errors if it is gone already
                self._ray.kill(place.actor)
            place.actor = None

    def close(self) -> None:
        for place in self.places:
            self._kill(place)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise BatchError(f"--ray needs Ray: {install_command('ray')}") from error
    return ray


def _connect(ray: Any, address: str) -> None:
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if address == AUTO and _running_cluster() is None:
        address = "local"
        quiet |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    elif address != AUTO:
        _check_address(address)
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        raise BatchError(
            f"Ray cannot join what listens at {address}: it takes the cluster's version of Ray, "
            "and RAY_AUTH_MODE=token where `ray start` said that it wants tokens"
        ) from error
    except (RuntimeError, ValueError) as error:  # of another version of Ray or Python, say
        raise BatchError(f"Ray at {address}: {_first_line(str(error))}") from error


def _running_cluster() -> str | None:
    """Return the address of the cluster that this machine belongs to.

    A cluster that ended without `ray stop` is ignored: Ray would retry for minutes.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        noted = Path(folder, "ray", "ray_current_cluster")
        address = noted.read_text().strip() if noted.is_file() else ""
    return address if address and _answers(address) else None


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, ValueError):
        return False
    return True


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit() and len(port) < 6):
        raise BatchError(f"--ray is {address!r}, must be auto, or HOST:PORT as `ray start` told it")
    if not _answers(address):
        raise BatchError(
            f"nobody answers at {address}: start a cluster with `ray start --head`, or use --ray "
            "auto"
        )


def _places(ray: Any, n_workers: int | None) -> list[Place]:
    """Return one place per worker, machine by machine; workers of one machine share its CPUs."""
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise BatchError("the Ray cluster has no machine with a processor: see `ray status`")
    n_workers = n_workers or len(nodes)
    n_on_each = math.ceil(n_workers / len(nodes))
    chosen = (nodes[index % len(nodes)] for index in range(n_workers))
    return [
        Place(
            node["NodeID"],
            node["NodeManagerHostname"],
            max(1, int(node["Resources"]["CPU"]) // n_on_each),
        )
        for node in chosen
    ]


def _absolute(model: str | Path) -> str | Path:
    """Return an absolute path, for workers have another working directory; names stay."""
    return Path(model).absolute() if Path(model).exists() else model


def _last_line(text: str) -> str:
    return _first_line(text.strip().splitlines()[-1])


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "no reason is known")
