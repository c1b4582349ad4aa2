"""The engine's memory budget, as clients and SIGHUP change it: kept when an engine is replaced."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request

from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.serve.api.budget import BudgetRequest, BudgetResponse, budget_answer, set_budget
from specdec.serve.api.reading import read_request
from specdec.serve.errors import ApiError
from specdec.serve.process.messages import pickled
from specdec.serve.service import Service

ReadBudget = Callable[[], str]
"""Returns the budget that the config file has now. Raises SpecdecError."""


class Budget:
    """The memory budget of a service.

    say: takes a line for the server's operator.
    """

    def __init__(self, service: Service, say: Callable[[str], None]) -> None:
        self._service, self._say = service, say
        self._changed: BudgetRequest | None = None
        """The last change, for engines to come: they start with the options of the command."""

    @property
    def present(self) -> BudgetResponse:
        """Figures of the present plan. Raises ApiError while there is none."""
        return budget_answer(self._service.model.plan)

    async def change(self, request: Request) -> BudgetResponse:
        """Change the budget for a client. Raises ApiError."""
        form: BudgetRequest | None = None

        def read(body: bytearray) -> BudgetRequest:
            nonlocal form
            form = read_request(body, BudgetRequest)
            return form

        answer: BudgetResponse = await self._service.compute(request, read, set_budget)
        self._note(form, answer)
        return answer

    async def restore(self) -> None:
        """Give a new engine the budget of the one before."""
        if self._changed is not None:
            await self._send(self._changed)

    async def read_again(self, read: ReadBudget) -> None:
        """Take the budget from the config file."""
        try:
            await self._send(BudgetRequest(memory_budget=read()))
        except SpecdecError as error:
            self._say(f"the memory budget stays as it is: {error}")

    async def _send(self, form: BudgetRequest) -> None:
        try:
            asked = self._service.engine.compute(set_budget, pickled(form))
            self._note(form, await asked.next())
        except ApiError as error:
            self._say(f"the memory budget stays as it is: {error.message}")

    def _note(self, form: BudgetRequest | None, answer: BudgetResponse) -> None:
        self._changed = form
        self._say(f"the memory budget is {format_bytes(answer.memory_budget_bytes)} now")
