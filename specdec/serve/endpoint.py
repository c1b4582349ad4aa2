"""Endpoint: how the requests of a route are read and answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.serve.api.answer import Answer
from specdec.serve.jobs import JobHead
from specdec.serve.router.prefixes import Prefix


@dataclass(frozen=True)
class Reading:
    """A body that was read.

    form: the chat or completion that it asks for. repeated: fields that the answer repeats.
    model: the name that it has. keep_alive: seconds that the model stays loaded after it, if it
    says so. streams: whether the answer is a stream. prefixes: of the prompt, where the model has
    replicas.
    """

    form: Any
    repeated: Any = None
    model: str | None = None
    keep_alive: float | None = None
    streams: bool = False
    prefixes: tuple[Prefix, ...] = ()


@dataclass(frozen=True)
class Endpoint:
    """Parsing and answering of the requests of a route. Clients get the errors that it raises.

    answer: takes the model's name, the head of the job that the engine made of a request, and the
    request's repeated fields.
    """

    read: Callable[[bytearray], Reading]
    answer: Callable[[str, JobHead, Any], Answer]
