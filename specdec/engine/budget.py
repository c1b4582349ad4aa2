"""Change of a run's memory budget between two steps; the text stays the same.

Planned first: a budget that cannot hold the run is refused, and nothing changes. If what is loaded
fits, only the opportunistic layers change. Otherwise all sequences are preempted, the models are
closed and loaded by the new plan, and the sequences go on from their tokens.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from backends.contract.backend import BackendError
from offload.errors import SpecdecError
from offload.process.memory import MemoryLimit, memory_limit
from offload.units import format_bytes
from specdec.checks import ConfigError, FieldName
from specdec.engine.draft_worker import DraftWorker
from specdec.engine.engine import Engine
from specdec.planning.loaded import LoadedModels
from specdec.planning.new_budget import adjusted_plan
from specdec.planning.plan import PlannedModels
from specdec.planning.run_plan import RunPlan
from specdec.run_options import CUDA

logger = logging.getLogger(__name__)
WATCH_SECONDS = 1.0
"""Interval at which the limit of the process is read."""
RETRY_SECONDS = 10.0
"""Interval after a refusal beside a beam search: to plan takes up to a second."""


class BeamsRunning(BackendError):
    """A running beam search needs wider passes than the new budget is planned for."""


def change_budget(
    engine: Engine,
    models: LoadedModels,
    total_bytes: int,
    source: str,
    load: Callable[[PlannedModels], None],
) -> None:
    """Change the budget of loaded models, in the engine's thread between two steps.

    source: origin of the budget, for users. load: closes the models and loads them as planned.

    Raises BudgetExceeded where it cannot hold the run, BeamsRunning where a running beam search
    would not fit, and ConfigError on a GPU; nothing has changed then. Raises errors of `load`.
    """
    if models.plan.device == CUDA:  # not tested there
        raise ConfigError(
            FieldName("memory_budget"), " of a run on a GPU stays as it is: load the models again"
        )
    planning = models.planned.planning
    if planning.takes_memory:
        models.target.set_pinned_bytes(0)
    planned = planning.plan(total_bytes, source)
    adjusted = adjusted_plan(models.plan, planned)
    if adjusted is None:
        check_beams(engine, planned)
        models.target.set_pinned_bytes(0)  # preempted sequences may write their KV to files first
        load(planned)
    else:
        models.planned = replace(models.planned, plan=adjusted)
        engine.opportunistic_layers.set_budget(total_bytes)


def reload(
    engine: Engine,
    models: LoadedModels,
    planned: PlannedModels,
    worker: DraftWorker,
    assemble: Callable[[], None],
) -> None:
    """Load models by another plan, or by the present one where that fails; running sequences go on.

    worker: a thread that uses the draft. assemble: lets the engine and new sequences use them.

    Raises the error of loading. If neither plan can be loaded and used, the engine ends.
    """
    present = models.planned
    engine.suspend()
    try:
        worker.close()
        models.close()
        failure = _load_either(models, planned, present)
        assemble()
        engine.resume()
    except BaseException as error:
        engine.end_by(error)
        raise
    if failure is not None:
        raise failure


def _load_either(
    models: LoadedModels, planned: PlannedModels, present: PlannedModels
) -> BaseException | None:
    """Load models as planned, or as they were: return the error then. Raises it where both fail."""
    try:
        models.load(planned)
    except BaseException as error:
        try:
            models.load(present)
        except BaseException as again:
            raise error from again
        return error
    return None


def check_beams(engine: Engine, planned: PlannedModels) -> None:
    """Raise BeamsRunning where the new plan has no memory for the beams of a running search."""
    limit = planned.options.max_target_tokens(planned.plan.n_draft_tokens)
    num_beams = max((request.params.num_beams for request in engine.requests), default=1)
    if num_beams > limit:
        raise BeamsRunning(
            f"a running search has {num_beams} beams, and a memory budget of "
            f"{format_bytes(planned.plan.budget_bytes)} is planned for passes of {limit} tokens: "
            f"wait until it has ended, or load with num_beams={num_beams} (--num-beams)"
        )


class LimitWatch:
    """Watch over the memory limit of this process, which others may lower while it runs.

    change: takes a budget in bytes and its origin. Where it raises an error, the budget stays as it
        is, and it is called again for another limit; after BeamsRunning also for the same one.
    """

    def __init__(
        self,
        change: Callable[[int, str], None],
        read_limit: Callable[[], MemoryLimit] = memory_limit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._change, self._read_limit, self._clock = change, read_limit, clock
        self._next_read = clock() + WATCH_SECONDS
        self._refused_bytes: int | None = None
        self._last_failure: str | None = None

    def check(self, budget_bytes: int) -> None:
        """Lower the budget to a limit that has become smaller; call it after every step."""
        if self._clock() < self._next_read:
            return
        self._next_read, limit = self._clock() + WATCH_SECONDS, self._read_limit()
        if limit.n_bytes >= budget_bytes or limit.n_bytes == self._refused_bytes:
            return
        limited = f"the limit of this process ({limit.source}) is {format_bytes(limit.n_bytes)} now"
        try:
            self._change(limit.n_bytes, limit.source)
        except BeamsRunning as error:  # until the search has ended
            self._next_read = self._clock() + RETRY_SECONDS
            self._tell_failure(limited, error)
        except Exception as error:  # loading may fail in libraries, and runs go on as they were
            self._refused_bytes = limit.n_bytes
            self._tell_failure(limited, error)
        else:
            was = format_bytes(budget_bytes)
            logger.warning("%s: the memory budget follows it, from %s", limited, was)

    def _tell_failure(self, limited: str, error: Exception) -> None:
        """Log one line, unless the last one was the same."""
        text = str(error) if isinstance(error, SpecdecError) else repr(error)
        line = f"{limited}, below the memory budget, which stays as it is: {text}"
        if line != self._last_failure:
            self._last_failure = line
            logger.warning("%s", line)


class Budgeted(Protocol):
    """A session, as far as the watch over its limit needs it."""

    @property
    def plan(self) -> RunPlan: ...

    @property
    def is_open(self) -> bool: ...

    def change_budget(self, total_bytes: int, source: str) -> None: ...


def watching_limit(session: weakref.ref[Budgeted]) -> Callable[[], None]:
    """Return a function, to be called after every step, that lets a session's budget follow a
    memory limit that has become smaller."""

    def change(total_bytes: int, source: str) -> None:
        if (changed := session()) is not None:
            changed.change_budget(total_bytes, source)

    watch = LimitWatch(change)

    def check() -> None:
        if (watched := session()) is not None and watched.is_open:
            watch.check(watched.plan.budget_bytes)

    return check
