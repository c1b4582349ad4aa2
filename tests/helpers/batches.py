"""Batches without models: the answer to a line is derived from the line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.batch.answering import Answer, Answered
from specdec.batch.lines import Line
from specdec.batch.records import to_line
from specdec.batch.run import Answerer, Batch, BatchMetrics
from specdec.metrics.stats import EngineStats

Arrange = Callable[[Iterable[Line]], Iterable[Line]]


class Killed(Exception):
    """Raised in place of the end of the process."""


def answer_of(line: Line) -> Answer:
    """Return a record unique to this line; now and then one with an error."""
    is_error = line.number % 5 == 4
    text = line.data.decode(errors="replace")[::-1]
    body = {"error": {"message": text}} if is_error else {"text": text}
    record = {"line": line.number, "digest": f"{line.digest:016x}", **body}
    return Answer(line.key, to_line(record), is_error, 2, 3)


class Machine:
    """Answer lines and count how often each was answered.

    arrange: the order in which they are finished; n_before_kill: answers before it is killed.
    """

    def __init__(self, arrange: Arrange = iter, n_before_kill: int | None = None) -> None:
        self.numbers: list[int] = []
        self._arrange, self._n_before_kill = arrange, n_before_kill

    def answer(self, lines: Iterable[Line], answered: Answered) -> EngineStats:
        for line in self._arrange(lines):
            if len(self.numbers) == self._n_before_kill:
                raise Killed
            self.numbers.append(line.number)
            answered(answer_of(line))
        return EngineStats()

    @contextmanager
    def open(self) -> Iterator[Answerer]:
        yield self.answer


def run(
    source: Path, out: Path, machine: Machine | None = None, order: str = "input", **options: Any
) -> BatchMetrics:
    metrics = BatchMetrics()
    Batch(source, out, order, options).run((machine or Machine()).open, metrics)
    return metrics


def write_prompts(path: Path, n_lines: int, start: int = 0) -> Path:
    with open(path, "a") as file:
        for index in range(start, start + n_lines):
            file.write(json.dumps({"prompt": f"prompt {index}"}) + "\n")
    return path


def whole(source: Path, order: str = "input") -> bytes:
    """Return the output of an undisturbed run."""
    out = source.parent / "undisturbed.jsonl"
    out.unlink(missing_ok=True)
    run(source, out, order=order)
    return out.read_bytes()


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def mixed(lines: Iterable[Line]) -> Iterator[Line]:
    """Shuffle the order in which up to three requests at a time finish."""
    lines = iter(lines)
    while some := list(islice(lines, 3)):
        yield from reversed(some)


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
