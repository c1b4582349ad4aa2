"""One of several machines: a process of Ray's with the models, which is handed line after line.

The models draw the lines (`LLM.generate_each`), and Ray calls methods: so the models have a thread
of their own, and each call hands over what it last asked for and waits for what it says next. It
asks for a line whenever there is room for one. So the other side knows at any time which lines a
worker has in hand, and a worker that dies takes none of them along.
"""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from offload.errors import SpecdecError
from specdec import __version__
from specdec.batch.lines import BatchError, Line
from specdec.metrics.stats import EngineStats
from specdec.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specdec.api import LLM
    from specdec.batch.answering import Answer
    from specdec.batch.request import Rules


@dataclass(frozen=True)
class Requested:
    """There is room for a line, and nothing else is said before one is given, or None."""


@dataclass(frozen=True)
class Reported:
    """A line is answered. stats: of the models, since they were loaded."""

    answer: Answer
    stats: EngineStats


@dataclass(frozen=True)
class Ended:
    """All lines that were given are answered."""


@dataclass(frozen=True)
class Failed:
    """No line can be answered here."""

    message: str


class Worker:
    """Its methods return what its models say next: one of the above.

    Args:
        load: the models, as each machine opens them for itself.
        version: of the specdec that hands out the lines.
    """

    def __init__(self, load: RunOptions, rules: Rules, version: str) -> None:
        self._load, self._rules, self._version = load, rules, version
        self._llm: LLM | None = None
        self._given: SimpleQueue[Line | None] = SimpleQueue()
        self._said: SimpleQueue[object] = SimpleQueue()

    def start(self) -> object:
        """Begin to answer lines, until None is given."""
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
        if self._version != __version__:
            raise BatchError(
                f"this machine has specdec {__version__}, the batch was begun by {self._version}: "
                "install the same version"
            )
        self._check_weights()
        if self._llm is None:
            from specdec.api import load

            self._llm = load(**self._load.keywords())
        return self._llm

    def _check_weights(self) -> None:
        requested = self._rules.weights
        if requested is None:
            return
        from specdec.models.names import resolve_model
        from specdec.models.weight_files import weights_fingerprint

        result = weights_fingerprint(resolve_model(self._load.model))
        if result != requested:
            raise BatchError(
                f"{self._rules.model} has the weights {result} on this machine, the batch was begun "
                f"with {requested}: copy the model here"
            )

    def _lines(self) -> Iterator[Line]:
        while True:
            self._said.put(Requested())
            line = self._given.get()
            if line is None:
                return
            yield line
