"""The engines of one model, while it is loaded: one, or with --ray one on each machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from specdec.serve.errors import engine_lost
from specdec.serve.process.child import Start
from specdec.serve.process.client import EngineClient
from specdec.serve.process.messages import Beat
from specdec.serve.process.supervisor import Supervisor
from specdec.serve.router.prefixes import Load, Prefix, ReplicaChooser
from specdec.serve.router.states import FAILED, READY, RESTARTING, STARTING, UNLOADED, ModelState


class ReplicaUsers(Protocol):
    """Users of a model's replicas."""

    def opened(self, replica: Replica) -> None:
        """Take note of its engine."""

    def lost(self, replica: Replica) -> None:
        """Take note that its engine has ended."""


class Replica:
    """An engine that is started again when it has ended.

    number: from 1. say: takes a line for the server's operator. timeout_seconds: see `Supervisor`.

    Attributes:
        state: UNLOADED, STARTING for the first engine, READY, RESTARTING or FAILED.
        engine: the engine, while it takes requests.
        given_up: see `Supervisor`.
    """

    def __init__(
        self,
        number: int,
        users: ReplicaUsers,
        say: Callable[[str], None],
        timeout_seconds: float,
    ) -> None:
        self.number, self.say = number, say
        self.state: ModelState = UNLOADED
        self.engine: EngineClient | None = None
        self.given_up = ""
        self._users, self._timeout_seconds = users, timeout_seconds
        self._supervisor: Supervisor | None = None
        self._num_restarts = 0  # before the present supervisor

    @property
    def num_restarts(self) -> int:
        """Engines that were started because another one had ended."""
        return self._num_restarts + (self._supervisor.num_restarts if self._supervisor else 0)

    def begin(self, start: Start) -> None:
        """Prepare to `run` engines that `start` starts."""
        self.state, self.given_up = STARTING, ""
        self._supervisor = Supervisor(start, self, self.say, self._timeout_seconds)

    async def run(self) -> int | None:
        """See `Supervisor.run`."""
        assert self._supervisor is not None, "it has begun"
        try:
            return await self._supervisor.run()
        finally:
            self._num_restarts, self._supervisor = self.num_restarts, None
            self.engine = None
            if self.state != FAILED:
                self.state = UNLOADED

    def end(self) -> None:
        """End its engine without waiting. Idempotent."""
        if self._supervisor is not None:
            self._supervisor.end()

    def open(self, engine: EngineClient) -> None:
        """See `supervisor.Users`."""
        self.engine, self.state = engine, READY
        self._users.opened(self)

    def lose(self, *, is_final: bool) -> None:
        """See `supervisor.Users`."""
        self.engine, self.state = None, FAILED if is_final else RESTARTING
        self.given_up = self._supervisor.given_up if self._supervisor is not None else ""
        self._users.lost(self)


class Replicas:
    """All engines of a model.

    starts: function that starts an engine, for each. users, say, timeout_seconds: see `Replica`.

    Attributes:
        chooser: of the replica that gets a request.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        users: ReplicaUsers,
        say: Callable[[str], None],
        timeout_seconds: float,
    ) -> None:
        self.chooser = ReplicaChooser()
        self._starts = starts
        self._replicas = [
            Replica(number, users, _sayer(say, number, len(starts)), timeout_seconds)
            for number in range(1, len(starts) + 1)
        ]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    @property
    def states(self) -> set[ModelState]:
        return {replica.state for replica in self}

    @property
    def given_up(self) -> list[str]:
        """Why engines are not started any more, one text for each of these."""
        reasons = [(f"replica {item.number}", item.given_up) for item in self if item.given_up]
        return [f"{name if len(self) > 1 else 'engine'}: {reason}" for name, reason in reasons]

    @property
    def open_engines(self) -> dict[int, EngineClient]:
        """Engines that take requests, by the number of their replica."""
        return {replica.number: replica.engine for replica in self if replica.engine is not None}

    @property
    def beats(self) -> dict[int, Beat]:
        """The last signs of life of these."""
        return {number: engine.beat for number, engine in self.open_engines.items()}

    @property
    def all_engines(self) -> list[EngineClient]:
        """Engines of all replicas that are not given up. Raises ApiError while one is started
        again."""
        if RESTARTING in self.states:
            raise engine_lost()
        return list(self.open_engines.values())

    def choose(self, prefixes: tuple[Prefix, ...]) -> EngineClient:
        """Return the engine for a request, whose prompt has these prefixes; there is one."""
        engines = self.open_engines
        loads = {
            number: Load(len(engine.requests), engine.model.num_slots if engine.model else 1)
            for number, engine in engines.items()
        }
        return engines[self.chooser.choose(loads, prefixes)]

    def begin(self) -> None:
        """Prepare to `run` engines."""
        for replica, start in zip(self, self._starts, strict=True):
            replica.begin(start)

    async def run(self, on_load_error: Callable[[int], None]) -> None:
        """Run all engines to their end. on_load_error: gets the exit code of each first engine that
        could not load the model."""

        async def run(replica: Replica) -> None:
            try:
                code = await replica.run()
            except BaseException:
                self.end()
                raise
            if code is not None:
                on_load_error(code)

        results = await asyncio.gather(*map(run, self), return_exceptions=True)
        for error in filter(None, results):
            raise error  # a fault of ours

    def end(self) -> None:
        """End all engines without waiting. Idempotent."""
        for replica in self:
            replica.end()

    async def refresh(self) -> None:
        """Get the engines' present statistics."""
        await asyncio.gather(*(engine.refresh() for engine in self.open_engines.values()))


def _sayer(say: Callable[[str], None], number: int, num_replicas: int) -> Callable[[str], None]:
    return say if num_replicas == 1 else lambda line: say(f"replica {number}: {line}")
