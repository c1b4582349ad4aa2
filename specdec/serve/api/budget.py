"""The memory budget of a running server: the plan's main figures, and another budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from offload.budget import BudgetExceeded
from offload.units import UnitError
from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.engine.budget import BeamsRunning
from specdec.serve.api.base import RequestModel
from specdec.serve.errors import bad_request
from specdec.serve.responses import Count, ResponseModel

_MAX_CHARACTERS = 40
_REFUSALS = (ConfigError, UnitError, BudgetExceeded, BeamsRunning)
"""Errors of a budget that is not taken; nothing has changed then."""


class BudgetRequest(RequestModel):
    """memory_budget: as --memory-budget, for example 2GiB; auto; or bytes."""

    memory_budget: Annotated[str, Field(max_length=_MAX_CHARACTERS)] | int


class BudgetResponse(ResponseModel):
    """Figures of the plan for the present budget, named as in /v1/plan."""

    memory_budget_bytes: Count
    memory_budget_source: str
    smallest_budget_bytes: Count
    smallest_without_draft_bytes: Count
    kv_tokens: Count
    num_draft_tokens: Count
    streamed_bytes_per_pass: Count
    plain_tokens_per_second: float
    predicted_tokens_per_second: float


def budget_answer(plan: Mapping[str, Any]) -> BudgetResponse:
    """Return the figures of a plan. plan: as `specdec plan --json` prints it."""
    return BudgetResponse(**{name: plan[name] for name in BudgetResponse.model_fields})


def set_budget(memory_budget: str | int, llm: LLM) -> BudgetResponse:
    """Change the budget, and return the new plan's figures.

    Raises ApiError where the budget is refused, and errors of loading the models again.
    """
    try:
        plan = llm.set_memory_budget(memory_budget)
    except _REFUSALS as error:
        raise bad_request(str(error), "memory_budget") from error
    return budget_answer(plan.to_dict())
