"""Router: the models of a server by name, loaded within one memory budget."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from difflib import get_close_matches

from specdec.serve.errors import bad_request, loading, no_such_model
from specdec.serve.process.client import EngineClient
from specdec.serve.router.prefixes import Prefix
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.share import Share
from specdec.serve.router.states import UNLOADED, WAITING

_MAX_NAME = 200


class ModelRouter:
    """All models of a server; used in the event loop's thread.

    capacity: memory of all engines together, also where a preset has one model; None for a server
    of one model, which is loaded at its start. is_strict: whether one model answers to no other
    name.
    """

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        capacity: Share | None = None,
        *,
        is_strict: bool = False,
    ) -> None:
        self.runners = tuple(runners)
        self.capacity = capacity
        self._is_strict = is_strict or len(self.runners) > 1
        self._by_name = {name: runner for runner in self.runners for name in runner.names}
        self.sharing = asyncio.Lock()
        """Whoever has it may change which model has which memory."""
        self._loads: set[asyncio.Task[None]] = set()

    @property
    def only(self) -> ModelRunner | None:
        """The model of a server that loads one at its start; None with a preset."""
        return self.runners[0] if len(self.runners) == 1 and self.capacity is None else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def find(self, name: str | None) -> ModelRunner:
        """Return the model that a request names. Raises ApiError."""
        if name in self._by_name:
            return self._by_name[name]
        if not self._is_strict or (name is None and len(self.runners) == 1):
            return self.runners[0]
        if name is None:
            raise bad_request(f"name a model: one of {', '.join(self.names)}", "model")
        return self.named(name)

    def named(self, name: str) -> ModelRunner:
        """Return the model of exactly this name. Raises ApiError."""
        # Ollama's clients add a tag.
        runner = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if runner is None:
            near = get_close_matches(name[:_MAX_NAME], self.names, 3)
            raise no_such_model(near, self.names)
        return runner

    async def acquire(
        self,
        runner: ModelRunner,
        keep_alive: float | None = None,
        prefixes: tuple[Prefix, ...] = (),
    ) -> EngineClient:
        """Return the engine of a model for a request, and count that until `runner.end`. The model
        is loaded before if need be.

        prefixes: of the prompt, where the model has replicas.

        Raises ApiError.
        """
        if not runner.is_open and self.capacity is None and not runner.has_been_loaded:
            raise loading()  # the server starts: programs that watch it know this status
        runner.num_waiting += 1
        try:
            while not runner.is_open:
                self.load(runner)
                await runner.changed()
        finally:
            runner.num_waiting -= 1
            runner.expire_later()
        runner.begin(keep_alive)
        return runner.replicas.choose(prefixes)

    def load(self, runner: ModelRunner) -> None:
        """Load a model once there is memory for it, unless it is loaded or about to be."""
        if runner.state == UNLOADED:
            runner.to(WAITING)
            task = asyncio.get_running_loop().create_task(self._load(runner))
            self._loads.add(task)
            task.add_done_callback(self._loads.discard)

    async def _load(self, runner: ModelRunner) -> None:
        async with self.sharing:  # first come, first served
            await self._free_memory(runner)
            runner.load()

    async def _free_memory(self, runner: ModelRunner) -> None:
        """Unload models until another one fits: those without requests first, then the least
        recently used; requests that one of these has are waited for, and new ones wait."""
        share = runner.options.share
        if self.capacity is None or share is None:
            return
        while not (self._used(runner) + share).fits(self.capacity):
            loaded = [other for other in self.runners if other.is_loaded]
            victim = min(loaded, key=lambda other: (not other.is_idle, other.last_use))
            await victim.leave()

    def free_bytes(self, runner: ModelRunner) -> int | None:
        """Return the host memory that the other loaded models leave to one; None for a server of
        one model, whose engine knows what there is."""
        if self.capacity is None:
            return None
        return self.capacity.host_bytes - self._used(runner).host_bytes

    def _used(self, runner: ModelRunner) -> Share:
        used = Share()
        for other in self.runners:
            if other is not runner and other.is_loaded and other.options.share is not None:
                used += other.options.share
        return used

    def unload(self, runner: ModelRunner) -> asyncio.Task[None]:
        """Unload a model as soon as it has no requests."""
        task = asyncio.get_running_loop().create_task(runner.leave())
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return task

    async def end(self) -> None:
        """End all engines. Raises what is a fault of ours."""
        for task in self._loads:
            task.cancel()
        for runner in self.runners:
            runner.unload()
        for runner in self.runners:
            await runner.ended()

    async def refresh(self) -> None:
        """Get the engines' present statistics."""
        await asyncio.gather(*(runner.replicas.refresh() for runner in self.runners))
