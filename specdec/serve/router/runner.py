"""One model of a server: its engines while it is loaded, and its requests."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from offload.units import format_bytes
from specdec.serve.errors import (
    ApiError,
    engine_failed,
    engine_lost,
    load_failed,
    loading,
    not_loaded,
)
from specdec.serve.process.child import Process
from specdec.serve.process.client import EngineClient
from specdec.serve.process.messages import ServedModel
from specdec.serve.router.replicas import Replica, Replicas
from specdec.serve.router.share import ModelOptions, Starter
from specdec.serve.router.states import (
    FAILED,
    FAILING,
    READY,
    RESTARTING,
    STARTING,
    UNLOADED,
    UNLOADING,
    ModelState,
)

_TAKES_REQUESTS = (READY, FAILING)


class ModelRunner:
    """A model; used in the event loop's thread.

    options: to load it with; its memory budget may change. starters: one for each replica. say:
    takes a line for the server's operator. timeout_seconds: see `Supervisor`.

    Attributes:
        num_active: requests that its engines have. num_waiting: requests that wait for an engine.
        has_been_loaded: whether it has taken requests.
        load_error: exit code of an engine that could not load the model; None otherwise.
    """

    def __init__(
        self,
        options: ModelOptions,
        starters: Sequence[Starter],
        say: Callable[[str], None],
        timeout_seconds: float,
    ) -> None:
        self.options = self._first_options = options
        self._say = say
        starts = [partial(self._start, starter) for starter in starters]
        self.replicas = Replicas(starts, self, say, timeout_seconds)
        self.state: ModelState = UNLOADED
        self.num_active = self.num_waiting = 0
        self.has_been_loaded = False
        self.load_error: int | None = None
        self.on_open: Callable[[ModelRunner], None] = lambda runner: None
        self.on_load_error: Callable[[ModelRunner], None] = lambda runner: None
        self.on_fault: Callable[[], None] = lambda: None
        self.last_use = time.monotonic()
        self.keep_alive = options.keep_alive
        self._last_engine: EngineClient | None = None  # it may have ended
        self._running: asyncio.Task[None] | None = None
        self._fault: Exception | None = None  # of ours
        self._timer: asyncio.TimerHandle | None = None
        self._changed: asyncio.Future[None] | None = None
        self._has_no_requests = asyncio.Event()
        self._has_no_requests.set()

    @property
    def name(self) -> str:
        return self.options.name

    @property
    def names(self) -> tuple[str, ...]:
        return self.options.names

    @property
    def model(self) -> ServedModel:
        """Facts about the model as an engine loaded or planned it last; raises ApiError before."""
        engine = next(iter(self.replicas.open_engines.values()), self._last_engine)
        if engine is None or engine.model is None:
            raise self._no_engine()
        return engine.model

    @property
    def is_loaded(self) -> bool:
        """Whether it has processes, and so memory."""
        return self._running is not None

    @property
    def is_idle(self) -> bool:
        return not self.num_active and not self.num_waiting

    @property
    def expires_at(self) -> float:
        """Time, in seconds since the epoch, when it is unloaded unless a request comes."""
        return time.time() + max(0.0, self.last_use + self.keep_alive - time.monotonic())

    @property
    def is_open(self) -> bool:
        """Whether it takes requests; not while it must be loaded or is unloaded.

        Raises ApiError while all engines are started again, and once they are given up.
        """
        if self.state == RESTARTING:
            raise engine_lost()
        if self.state == FAILED:
            raise engine_failed()
        return self.state in _TAKES_REQUESTS

    @property
    def engines(self) -> list[EngineClient]:
        """The engines of all replicas that are not given up.

        Raises ApiError unless the model is loaded, and while one of these is started again.
        """
        if not self.is_open:
            raise self._no_engine()
        return self.replicas.all_engines

    def _no_engine(self) -> ApiError:
        is_coming = self.options.on_startup and not self.has_been_loaded
        return loading() if is_coming or self.state == STARTING else not_loaded(self.name)

    async def changed(self) -> None:
        """Wait until the state has changed. Raises ApiError if the model could not be loaded."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def to(self, state: ModelState, error: ApiError | None = None) -> None:
        """Change the state; error: what waiting requests get."""
        self.state = state
        changed, self._changed = self._changed, None
        if changed is None:
            return
        if error is None:
            changed.set_result(None)
        else:
            changed.set_exception(error)
            changed.exception()  # the clients that waited may have left

    # --- requests ------------------------------------------------------------------------------

    def begin(self, keep_alive: float | None) -> None:
        """Count a request that an engine gets. keep_alive: the request's own, if it has one."""
        self.num_active += 1
        self._has_no_requests.clear()
        if keep_alive is None or self.options.is_kept:
            keep_alive = self.options.keep_alive
        self.keep_alive = keep_alive
        self.last_use = time.monotonic()
        self._stop_timer()

    def end(self) -> None:
        """Count the end of a request; the last one starts the time until the model is unloaded."""
        self.num_active -= 1
        self.last_use = time.monotonic()
        if not self.num_active:
            self._has_no_requests.set()
        self.expire_later()

    def expire_later(self) -> None:
        """Unload it after `keep_alive`, unless it is in use by then."""
        self._stop_timer()
        if self.is_idle and self.is_loaded and math.isfinite(self.keep_alive):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.keep_alive, self._expire)

    def _expire(self) -> None:
        if self.is_idle and self.state in _TAKES_REQUESTS:
            self.unload()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the processes -------------------------------------------------------------------------

    def load(self) -> None:
        """Start its engines."""
        self.to(STARTING)
        self.last_use, self.keep_alive = time.monotonic(), self.options.keep_alive
        self.load_error = None
        self.replicas.begin()
        self._running = asyncio.get_running_loop().create_task(self._run())

    def _start(self, starter: Starter, theirs: socket.socket, more: Mapping[str, str]) -> Process:
        return starter(self.options)(theirs, more)

    async def _run(self) -> None:
        try:
            await self.replicas.run(self._fail_to_load)
        except Exception as error:
            self._fault = error
            self.to(FAILED)
            self.on_fault()
        finally:
            self._running = None
            is_broken = self.load_error is not None
            if is_broken:
                self._forget_budget()
            if self.state != FAILED:
                self.to(UNLOADED, load_failed(self.name) if is_broken else None)
            if is_broken:
                self.on_load_error(self)

    def _fail_to_load(self, code: int) -> None:
        """End all replicas, as one cannot load the model."""
        self.load_error = code
        self.unload()

    def unload(self) -> None:
        """End its engines, which frees their memory; `ended` waits for that. Idempotent."""
        self._stop_timer()
        if self.is_loaded:
            if self.state != FAILED:
                self.to(UNLOADING)
            self.replicas.end()

    async def leave(self) -> None:
        """Unload it once its requests, those that wait for it included, have ended; new ones wait
        until it is loaded again."""
        while self.state == STARTING:
            with suppress(ApiError):
                await self.changed()
        while self.state in _TAKES_REQUESTS and self.num_waiting:
            await asyncio.sleep(0)  # the clients that have waited go on
        if self.is_loaded and self.state != FAILED:
            self.to(UNLOADING)
        await self._has_no_requests.wait()
        self.unload()
        await self.ended()

    async def ended(self) -> None:
        """Wait until it has no process. Raises what is a fault of ours."""
        while self._running is not None:
            await asyncio.shield(self._running)
        if self._fault is not None:
            raise self._fault

    def opened(self, replica: Replica) -> None:
        """See `ReplicaUsers`."""
        self._last_engine = replica.engine
        if self.options is not self._first_options:
            self._say_budget()
        if len(self.replicas) > 1:
            replica.say("the model is loaded")
        self._update()

    def lost(self, replica: Replica) -> None:
        """See `ReplicaUsers`."""
        self.replicas.chooser.forget(replica.number)
        self._update()

    def _update(self) -> None:
        """Change the state by those of the replicas: requests are taken once all have been loaded
        for the first time, and then as long as there is one."""
        states = self.replicas.states
        if self.state == UNLOADING or (self.state == STARTING and STARTING in states):
            return
        if READY in states:
            if self.state not in _TAKES_REQUESTS:
                self.has_been_loaded = True
                self.to(READY)
                self.on_open(self)
                self.expire_later()
        elif RESTARTING in states:
            self.to(RESTARTING)
        elif self._forget_budget():
            self.unload()
        else:
            self.to(FAILED)

    # --- its memory budget ---------------------------------------------------------------------

    def keep_budget(self, memory_budget: str | int, n_bytes: int) -> None:
        """Note that the engines have another budget, of so many bytes; engines to come get it."""
        self.options = self.options.with_budget(memory_budget, n_bytes)
        self._say_budget()

    def _say_budget(self) -> None:
        n_bytes = self.model.plan["memory_budget_bytes"]
        self._say(f"the memory budget is {format_bytes(n_bytes)} now")

    def _forget_budget(self) -> bool:
        """Return to the first budget after engines that could not run with another one; return
        whether there was one."""
        is_changed = self.options is not self._first_options
        if is_changed:
            self.options = self._first_options
            self._say("the next request loads the model with the memory budget of the start again")
        return is_changed

    def note_failure(self, *, is_storage: bool) -> None:
        """Note whether the model's files can be read."""
        if self.state in _TAKES_REQUESTS:
            self.state = FAILING if is_storage else READY
