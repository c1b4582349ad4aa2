"""Ray worker process with the models, which is handed one line after the other.

The models draw the lines (`LLM.generate_each`) while Ray calls methods. So the models have a
thread of their own, and each call hands over a line and waits for the next message. The worker
asks for a line whenever the scheduler has capacity for one. So the dispatcher always knows which
lines a worker has in hand, and none is lost with a worker that dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from offload.errors import SpecdecError
from specdec.batch.lines import Line
from specdec.cluster.machines import check_same
from specdec.metrics.stats import EngineStats
from specdec.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.api import LLM
    from specdec.batch.answering import Answer
    from specdec.batch.request import Rules


@dataclass(frozen=True)
class Requested:
    """Request for a line; no other message follows before one, or None, is given."""


@dataclass(frozen=True)
class Reported:
    """Finished answer. stats: engine metrics since the models were loaded."""

    answer: Answer
    stats: EngineStats


@dataclass(frozen=True)
class Ended:
    """End: all lines that were given are answered."""


@dataclass(frozen=True)
class Failed:
    """Failure that keeps this worker from answering any line."""

    message: str


class Worker:
    """Ray actor whose methods return the next message of its models: one of the above.

    Args:
        load: options with which each machine opens the models.
        version: specdec version of the dispatcher.
    """

    def __init__(self, load: RunOptions, rules: Rules, version: str) -> None:
        self._load, self._rules, self._version = load, rules, version
        self._llm: LLM | None = None
        self._given: SimpleQueue[Line | None] = SimpleQueue()
        self._said: SimpleQueue[object] = SimpleQueue()

    def start(self) -> object:
        """Start a thread that answers lines until None is given; return its first message."""
        Thread(target=self._answer, daemon=True).start()
        return self.go_on()

    def give(self, line: Line | None) -> object:
        self._given.put(line)
        return self.go_on()

    def go_on(self) -> object:
        said = self._said.get()
        if isinstance(said, BaseException):
            raise said  # a bug: Ray carries its traceback over
        return said

    def _answer(self) -> None:
        try:
            from specdec.batch.answering import answer_lines

            llm = self._open()

            def answered(answer: Answer) -> None:
                self._said.put(Reported(answer, llm.stats))

            answer_lines(llm, self._lines(), self._rules, answered)
            self._said.put(Ended())
        except SpecdecError as error:
            self._said.put(Failed(str(error)))
        except BaseException as error:
            self._said.put(error)

    def _open(self) -> LLM:
        rules = self._rules
        check_same(self._version, self._load.model, rules.weights, rules.model)
        if self._llm is None:
            from specdec.api import load

            self._llm = load(**self._load.keywords())
        return self._llm

    def _lines(self) -> Iterator[Line]:
        while True:
            self._said.put(Requested())
            line = self._given.get()
            if line is None:
                return
            yield line
