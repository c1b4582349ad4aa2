"""Batch on several machines by Ray: assignment of lines to workers, and recovery of dead workers.

Actors are handed single lines. Ray Data's `map_batches` is not used: it returns a batch at a time,
so that passes have fewer and fewer tokens towards the end of each batch, and a killed worker loses
finished answers. Here each answer is stored as soon as it is finished, by the same journal as on
one machine; the lines that a dead worker had in hand go to the others.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from specdec import __version__
from specdec.batch.answering import Answered
from specdec.batch.lines import BatchError, Line
from specdec.batch.ray_worker import Ended, Failed, Reported, Requested, Worker
from specdec.batch.request import Rules
from specdec.batch.run import Answerer
from specdec.cluster.connection import connected, first_line, last_line
from specdec.cluster.machines import Machine, machines_of, with_absolute_paths
from specdec.metrics.stats import EngineStats, sum_of
from specdec.run_options import RunOptions

MAX_DEATHS = 3
"""Deaths in a row, without an answer in between, after which a worker is not started again."""
logger = logging.getLogger(__name__)


@dataclass
class Place:
    """Location of one worker, and the lines that it has in hand."""

    machine: Machine
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
        address: see `connected`.
        n_workers: number of workers; None: one on each machine. More of them share the machines.

    Raises ClusterError if there is no Ray, or no cluster.
    """
    with connected(address) as ray:
        cluster = Cluster(ray, with_absolute_paths(load), rules)
        try:
            cluster.places = _places(ray, n_workers)
            yield cluster.answer
        finally:
            cluster.close()


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
                raise BatchError(f"on {place.machine.name}: {said.message}")
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
                    f"on {place.machine.name} no worker can begin: {last_line(str(error))}; "
                    f"install specdec {__version__} for the Python that runs Ray there"
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
        problem = f"a worker on {place.machine.name} ended ({first_line(reason)})"
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
        self._kill(place)
        options = place.machine.actor_options(place.n_cpus, is_soft=True)
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


def _places(ray: Any, n_workers: int | None) -> list[Place]:
    """Return one place per worker, machine by machine; workers of one machine share its CPUs."""
    machines = machines_of(ray)
    n_workers = n_workers or len(machines)
    n_on_each = math.ceil(n_workers / len(machines))
    chosen = (machines[index % len(machines)] for index in range(n_workers))
    return [Place(machine, max(1, machine.n_cpus // n_on_each)) for machine in chosen]
