"""Endpoint: how the requests of a route are read, run and answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specdec.api import LLM
from specdec.grammar.constraint import Constraint
from specdec.serve.api.answer import Answer
from specdec.serve.jobs import Job


@dataclass(frozen=True)
class Endpoint:
    """Parsing and answering of the requests of a route. Clients get the errors that it raises.

    constraint: returns the body's constraint that must be tried in another process, or None.
    job: takes a body whose constraint has been tried.
    """

    constraint: Callable[[bytearray], Constraint | None]
    job: Callable[[bytearray, LLM], Job]
    answer: Callable[[Job, LLM], Answer]
