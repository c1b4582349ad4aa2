"""Plans of the models of a preset, before the server starts: which share of memory each takes.

They are made in a process of their own, as the server's has no torch.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.errors import SpecdecError
from offload.process.memory import process_memory
from offload.units import MIB, format_bytes, parse_bytes
from specdec.run_options import AUTO, RunOptions
from specdec.serve.process.child import Start, described_exit, engine_marker, with_task
from specdec.serve.process.messages import MessageSocket, ServerGone
from specdec.serve.router.share import Share

_MARGIN_BYTES = 32 * MIB
"""Added to what a plan takes: the engine's process may be larger than the one that planned."""
_SERVER_BYTES = 64 * MIB
"""Reserved for the server's connections and requests beside its present memory."""


class PresetError(SpecdecError):
    """A model of a preset cannot be loaded with the server's memory."""


@dataclass(frozen=True)
class PlanTask:
    """Models to plan. memory_budget: of the server and all engines. server_bytes: its own part."""

    loads: tuple[RunOptions, ...]
    memory_budget: str | int
    server_bytes: int


@dataclass(frozen=True)
class PlannedShare:
    """A planned model. error: why it cannot be loaded; empty if it can."""

    share: Share = Share()
    ctx_size: int = 0
    error: str = ""


@dataclass(frozen=True)
class PlannedShares:
    """The plans of a task. capacity: memory of all engines together."""

    capacity: Share
    models: tuple[PlannedShare, ...]


def plan_shares(task: PlanTask) -> PlannedShares:
    """Return the share of each model: what it takes with all layers in memory, and all there is if
    it is larger than that; a budget of its own as it is. Raises SpecdecError."""
    from specdec.planning.memory.base import budget_of_run

    total_bytes, _ = budget_of_run(task.memory_budget)
    n_bytes = max(0, total_bytes - task.server_bytes)
    models = tuple(_planned(load, n_bytes) for load in task.loads)
    vram_bytes = max((model.share.vram_bytes for model in models), default=0)
    return PlannedShares(Share(n_bytes, vram_bytes), models)


def _planned(load: RunOptions, capacity_bytes: int) -> PlannedShare:
    from specdec.planning.plan import plan_run

    is_own = load.memory_budget != AUTO
    if is_own and parse_bytes(load.memory_budget) > capacity_bytes:
        return PlannedShare(
            error=f"its memory budget of {load.memory_budget} is above the "
            f"{format_bytes(capacity_bytes)} that all models have together"
        )
    budget = load.memory_budget if is_own else capacity_bytes
    try:
        plan = plan_run(**replace(load, memory_budget=budget).keywords())
    except SpecdecError as error:
        return PlannedShare(error=str(error))
    host_bytes = plan.budget_bytes
    if not is_own and not plan.placement.n_moving_layers:
        used = host_bytes - dict(plan.parts)["available"] + _MARGIN_BYTES
        host_bytes = min(host_bytes, used)
    # A GPU is not shared: an engine plans with all of its memory.
    return PlannedShare(Share(host_bytes, plan.vram_budget_bytes), plan.ctx_size)


def planned_elsewhere(
    start: Start, loads: Sequence[RunOptions], memory_budget: str | int
) -> PlannedShares:
    """Return `plan_shares` of a process that `start` starts. Raises PresetError."""
    server_bytes = process_memory().rss_bytes + _SERVER_BYTES
    task = PlanTask(tuple(loads), memory_budget, server_bytes)
    ours, theirs = socket.socketpair()
    with theirs:
        process = with_task(start, task)(theirs, engine_marker(theirs, 0))
    answers = MessageSocket(ours.detach())
    try:
        result: PlannedShares | str = answers.receive()
    except ServerGone:
        raise PresetError(
            f"the process that planned the models {described_exit(process.wait())}"
        ) from None
    finally:
        answers.close()
    process.wait()
    if isinstance(result, str):
        raise PresetError(result)
    return result
