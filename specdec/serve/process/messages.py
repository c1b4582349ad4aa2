"""Messages between the server's process and the engine's, and the frames that carry them.

Both processes run the same program, so a frame is a pickle behind its length. The socket between
them has no name: nobody else can write to it.
"""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.metrics.stats import EngineStats, GenerationStats
from specdec.serve.errors import ApiError
from specdec.serve.events import Choice, Usage

WINDOW = 32
"""Values of a stream that may wait in the server for a client that reads slowly."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class ServedModel:
    """Facts about the loaded model that routes tell without asking the engine.

    plan: as `specdec plan --json` prints it. num_slots: sequences that share passes.
    """

    plan: dict[str, Any]
    max_context: int
    num_slots: int
    has_chat_template: bool
    knows_tools: bool
    chat_template: str
    bos_token: str
    eos_token: str


# --- to the engine -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generate:
    """Run a request. form: pickled ChatRequest or CompletionRequest, unpickled when its turn comes:
    it takes ten times the bytes."""

    id: int
    form: bytes


@dataclass(frozen=True)
class Compute:
    """Return the result of a function of (form, LLM), which generates nothing. form: pickled."""

    id: int
    function: Callable[[Any, Any], Any]
    form: bytes


@dataclass(frozen=True)
class Cancel:
    """Cancel a request; its `Ended` still comes."""

    id: int


@dataclass(frozen=True)
class Taken:
    """The client has taken so many more values of a stream, of which at most WINDOW may wait."""

    id: int
    num_values: int


@dataclass(frozen=True)
class AskBeat:
    """Send a `Beat` now."""


# --- from the engine -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Beat:
    """A sign of life, sent every second by a thread of its own, also during loading and passes."""

    stats: EngineStats
    resident_bytes: int


@dataclass(frozen=True)
class Loaded:
    """The model is loaded: requests are taken."""

    model: ServedModel


@dataclass(frozen=True)
class Planned:
    """The model runs by another plan: its memory budget has changed."""

    plan: dict[str, Any]


@dataclass(frozen=True)
class Output:
    """Part of a request's output: its JobHead first, then events; `Whole` for one that does not
    stream; for `Compute` the result. A value of None only tells that a pass has ended."""

    id: int
    value: Any


@dataclass(frozen=True)
class Whole:
    """Answer to a request that does not stream."""

    choices: Sequence[Choice]
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """Error that ended a request. is_storage: the model's files cannot be read."""

    id: int
    error: ApiError
    is_storage: bool = False


@dataclass(frozen=True)
class Ended:
    """Nothing is computed for a request any more. stats: of its prompts that had begun."""

    id: int
    stats: Sequence[GenerationStats] = ()


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpickled(data: bytes) -> Any:
    """Return what the other process pickled."""
    return pickle.loads(data)  # noqa: S301  # what clients send is in its values, never its code


def frame(message: Any) -> bytes:
    """Return the bytes of a message: its length, then its pickle."""
    data = pickled(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


async def read_message(reader: Any) -> Any:
    """Return the next message of an asyncio.StreamReader; raises EOFError at the end.

    Raises asyncio.IncompleteReadError, an EOFError, where the other process ended within one.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return unpickled(await reader.readexactly(length))


class ServerGone(Exception):
    """The server's process has closed the socket, or has ended."""


class MessageSocket:
    """The engine's end of the socket. Any thread may send."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        self._file = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message. Raises ServerGone."""
        data = frame(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise ServerGone from error

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def receive(self) -> Any:
        """Return the next message. Raises ServerGone."""
        try:
            head = self._file.read(_LENGTH_BYTES)
            data = self._file.read(int.from_bytes(head, "big")) if head else b""
        except OSError as error:
            raise ServerGone from error
        if not data:
            raise ServerGone
        return unpickled(data)
