"""Run of a batch: find the lines that are left, answer them, and report progress."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specdec.batch.answering import Answer, Answered
from specdec.batch.journal import MADE_IN, Journal
from specdec.batch.lines import BatchError, Line, check_input, digest_key, read_lines
from specdec.metrics.stats import EngineStats


@dataclass
class BatchMetrics:
    """Progress of a batch, updated while it runs."""

    n_lines: int = 0
    """Non-blank lines of the input."""
    n_answered: int = 0
    n_before: int = 0
    """Lines that an earlier, interrupted run answered."""
    n_errors: int = 0
    """Lines whose record is an error, those of an earlier run included."""
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    seconds: float = 0.0
    """Seconds since the models were loaded."""
    engine: EngineStats | None = None
    """Engine metrics, summed over all workers."""
    models: set[str] = field(default_factory=set)
    """Model names in the lines."""

    @property
    def tokens_per_second(self) -> float:
        return self.n_generated_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left at the rate of this run; None before its first answer."""
        n_here = self.n_answered - self.n_before
        return self.seconds / n_here * (self.n_lines - self.n_answered) if n_here else None

    def count(self, answer: Answer, seconds: float) -> None:
        self.n_answered += 1
        self.n_errors += answer.is_error
        self.n_prompt_tokens += answer.n_prompt_tokens
        self.n_generated_tokens += answer.n_generated_tokens
        self.seconds = seconds
        if answer.model is not None:
            self.models.add(answer.model)


class Answerer(Protocol):
    """Function that answers lines: in this process, or by workers elsewhere."""

    def __call__(self, lines: Iterator[Line], answered: Answered) -> EngineStats:
        """Answer all lines and return the metrics of the engines that did it."""


@dataclass(frozen=True)
class Batch:
    """Input file and output file of a batch.

    options: those that can change the output; a batch is resumed with the same ones only.
    """

    source: Path
    out: Path
    order: str
    options: Mapping[str, Any]

    def run(
        self,
        open_answerer: Callable[[], AbstractContextManager[Answerer]],
        metrics: BatchMetrics,
        reported: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer the lines that are left, and put the output in its place.

        Args:
            open_answerer: loads the models; not called if nothing is left to do.
            metrics: updated during the run, for the caller to show.
            reported: called whenever the metrics changed.

        Raises:
            BatchError: there is nothing to answer, or the files belong to another batch or cannot
            be written; also errors of the answerer. Answered lines are never lost.
        """
        check_input(self.source)
        self._check_apart()
        key = digest_key(self.options)
        with Journal(self.out, self.options) as journal:
            self._count_lines(journal, key, metrics)
            reported()
            if metrics.n_before < metrics.n_lines:
                with open_answerer() as answer:
                    began = time.monotonic()

                    def answered(finished: Answer) -> None:
                        journal.append(finished.key, finished.record)
                        metrics.count(finished, time.monotonic() - began)
                        reported()

                    lines = read_lines(self.source, key)
                    left = (line for line in lines if not journal.is_answered(line.key))
                    try:
                        metrics.engine = answer(left, answered)
                    finally:  # Ctrl-C may come between a record and its count
                        metrics.n_answered = journal.n_answered
            if journal.n_answered < metrics.n_lines:
                raise BatchError(
                    f"{journal.n_answered} of {metrics.n_lines} lines of {self.source} were "
                    "answered, and then there were no more: was it cut meanwhile? The same command "
                    "goes on"
                )
            journal.finish(self.order)

    def _count_lines(self, journal: Journal, key: bytes, metrics: BatchMetrics) -> None:
        """Count the lines of the input and those answered before. Raises BatchError."""
        n_before = 0
        for line in read_lines(self.source, key):
            metrics.n_lines += 1
            n_before += journal.is_answered(line.key)
        if n_before < journal.n_answered:
            raise BatchError(
                f"{journal.out.name} answers {journal.n_answered} lines, of which the input "
                f"has {n_before}: {journal.begin_anew}"
            )
        metrics.n_answered = metrics.n_before = n_before
        metrics.n_errors = journal.count_errors()

    def _check_apart(self) -> None:
        real = os.path.realpath(self.out)
        for path in (self.out, *(Path(real + ending) for ending in MADE_IN)):
            if path.exists() and path.samefile(self.source):
                raise BatchError(f"{path} is the input: name another output file")
