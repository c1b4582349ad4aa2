"""Ctrl-C at chosen moments: where Python looks for signals, each time a function begins.

CPython handles a signal between two bytecodes, mostly at calls; a trace function that sends one
when a function is entered comes from the same places, and at the same one every time. It is a
signal, no exception, so that the handler of the moment has its say, as where a user presses keys.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class InterruptedAt(io.StringIO):
    """Output that is interrupted by Ctrl-C at the end of the n-th line."""

    def __init__(self, n_lines: int) -> None:
        super().__init__()
        self._n_left = n_lines

    def write(self, text: str) -> int:
        self._n_left -= text.count("\n")
        if self._n_left <= 0:
            raise KeyboardInterrupt
        return super().write(text)


class Interrupts:
    """Send SIGINT at the given calls of this thread into `folders`; `places` lists them.

    Python drops a trace function that raised, so the second interrupt is a profile function's.
    """

    def __init__(self, first: int, then: int | None, folders: tuple[str, ...]) -> None:
        self.places: list[str] = []
        self._n_until = [first, then]
        self._roots = tuple(f"{ROOT / folder}/" for folder in folders)

    def trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self._count(0, frame, event)

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.places:
            self._count(1, frame, event)

    def _count(self, number: int, frame: FrameType, event: str) -> None:
        n_until = self._n_until[number]
        if n_until is None or event != "call":
            return
        if frame.f_code.co_filename.startswith(self._roots):
            self._n_until[number] = n_until - 1
            if n_until == 1:
                self.places.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
                signal.raise_signal(signal.SIGINT)


def files_of(places: Iterable[str]) -> set[str]:
    """Return the interrupted files: how often a wait polls, and so which function of a file every
    n-th call is in, depends on the storage and differs from run to run."""
    return {place.partition(":")[0] for place in places}


@contextmanager
def interrupted(
    first: int, then: int | None = None, folders: tuple[str, ...] = ("offload",)
) -> Iterator[Interrupts]:
    """Press Ctrl-C in the block at the first-th call, and again at the then-th call after it.

    The block ends with the interrupt, and the program goes on.
    """
    interrupts = Interrupts(first, then, folders)
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(interrupts.trace)
    sys.setprofile(interrupts.profile)
    try:
        yield interrupts
    except KeyboardInterrupt:
        assert interrupts.places, "nobody interrupted this"
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
