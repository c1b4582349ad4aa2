"""Memory budgets of loaded models, as clients and SIGHUP change them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from starlette.requests import Request

from offload.errors import SpecdecError
from offload.units import UnitError, format_bytes, format_down, parse_bytes
from specdec.run_options import AUTO
from specdec.serve.api.budget import BudgetRequest, BudgetResponse, budget_answer, set_budget
from specdec.serve.api.reading import read_request
from specdec.serve.errors import ApiError, bad_request
from specdec.serve.middleware import BODY
from specdec.serve.process.client import EngineClient
from specdec.serve.process.messages import pickled
from specdec.serve.router.runner import ModelRunner
from specdec.serve.service import Service

ReadBudget = Callable[[], str]
"""Returns the budget that the config file has now. Raises SpecdecError."""


class Budget:
    """The memory budgets of a service's models.

    Args:
        say: takes a line for the server's operator.
        on_change: called with the model whose budget was changed.
    """

    def __init__(
        self,
        service: Service,
        say: Callable[[str], None],
        on_change: Callable[[ModelRunner], None],
    ) -> None:
        self._service, self._router, self._say = service, service.router, say
        self._on_change = on_change
        self._changes: set[asyncio.Task[BudgetResponse]] = set()

    def present(self, name: str | None) -> BudgetResponse:
        """Return figures of a model's present plan. name: None names the only one.

        Raises ApiError while there is none.
        """
        return budget_answer(self._router.find(name).model.plan)

    async def change(self, request: Request, name: str | None) -> BudgetResponse:
        """Change the budget of a loaded model for a client. Raises ApiError."""
        runner, body = self._router.find(name), request.scope[BODY]

        async def work() -> BudgetResponse:
            form = await self._service.parsed(lambda: read_request(body.content, BudgetRequest))
            change = asyncio.ensure_future(self._change(runner, form.memory_budget))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)
            return await asyncio.shield(change)  # noted to its end, also if the client leaves

        return await self._service.awaited(request, work(), lambda: runner)

    async def read_again(self, read: ReadBudget) -> None:
        """Take the budget of the only model from the config file."""
        try:
            await self._change(self._router.find(None), read())
        except (ApiError, SpecdecError) as error:
            self._say(f"the memory budget stays as it is: {error}")

    async def _change(self, runner: ModelRunner, memory_budget: str | int) -> BudgetResponse:
        async with self._router.sharing:
            requested = self._allowed(runner, memory_budget)
            engines = runner.engines
            runner.begin(None)
            try:
                answer = await set_all(engines, requested)
            finally:
                runner.end()
            runner.keep_budget(requested, answer.memory_budget_bytes)
            self._on_change(runner)
        return answer

    def _allowed(self, runner: ModelRunner, memory_budget: str | int) -> str | int:
        """Return the budget to ask an engine for: auto is what the other loaded models leave.

        Raises ApiError where it is more than that.
        """
        free_bytes = self._router.free_bytes(runner)
        if free_bytes is None:
            return memory_budget
        if memory_budget == AUTO:
            return free_bytes
        try:
            n_bytes = parse_bytes(memory_budget)
        except UnitError as error:
            raise bad_request(str(error), "memory_budget") from error
        if n_bytes > free_bytes:
            raise bad_request(
                f"the memory budget of {format_bytes(n_bytes)} for {runner.name} is above the "
                f"{format_down(free_bytes)} that the other loaded models leave: give at most "
                "that, or unload one",
                "memory_budget",
            )
        return n_bytes


async def set_all(engines: Sequence[EngineClient], memory_budget: str | int) -> BudgetResponse:
    """Change the budget of all replicas; return the first one's figures.

    Raises ApiError; those that have changed theirs get the one before back then.
    """
    changed: list[tuple[EngineClient, int]] = []
    answers = []
    try:
        for engine in engines:
            assert engine.model is not None, "it takes requests"
            before = int(engine.model.plan["memory_budget_bytes"])
            answers.append(await _set(engine, memory_budget))
            changed.append((engine, before))
    except ApiError:
        for engine, before in changed:
            with suppress(ApiError):  # it has ended meanwhile, and gets the one before anyhow
                await _set(engine, before)
        raise
    return answers[0]


async def _set(engine: EngineClient, memory_budget: str | int) -> BudgetResponse:
    answer: BudgetResponse = await engine.compute(set_budget, pickled(memory_budget)).next()
    return answer
