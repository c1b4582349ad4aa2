"""Endpoint: how the requests of a route are read and answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.serve.api.answer import Answer
from specdec.serve.jobs import JobHead


@dataclass(frozen=True)
class Endpoint:
    """Parsing and answering of the requests of a route. Clients get the errors that it raises.

    read: returns (the chat or completion that a body asks for, fields that the answer repeats).
    answer: takes the head of the job that the engine made of it, and these fields.
    """

    read: Callable[[bytearray], tuple[Any, Any]]
    answer: Callable[[JobHead, Any], Answer]
