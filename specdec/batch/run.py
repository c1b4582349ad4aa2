"""A batch from its files to its end: what is left, who answers it, what is told meanwhile."""

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
    """How far a batch is; it counts on while it runs."""

    n_lines: int = 0
    """Of the input, without blank ones."""
    n_answered: int = 0
    n_before: int = 0
    """Of the answered ones: by an earlier run that was broken off."""
    n_errors: int = 0
    """Lines of this run whose record is an error."""
    n_prompt_tokens: int = 0
    n_generated_tokens: int = 0
    seconds: float = 0.0
    """Since the models were there."""
    engine: EngineStats | None = None
    """Of all models that answered."""
    models: set[str] = field(default_factory=set)
    """That lines asked for by name."""

    @property
    def tokens_per_second(self) -> float:
        return self.n_generated_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the rate of this run; None before its first answer."""
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
    """Whoever answers lines: this process, or workers elsewhere."""

    def __call__(self, lines: Iterator[Line], answered: Answered) -> EngineStats:
        """Answer all lines; the figures of the models that did it."""


@dataclass(frozen=True)
class Batch:
    """One input, one output.

    options: that decide on the sequences; a batch is resumed with the same ones only.
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
        """Answer what is not answered yet, and put the output in its place.

        Args:
            open_answerer: loads the models; not called where nothing is left to do.
            figures: counted on, for the caller to show.
            told: called whenever they changed.

        Raises:
            BatchError: there is nothing to answer, the files are another batch's, or cannot be
            written; what the answerer raises. What was answered is kept in every case.
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

                    def answered(item: Answer) -> None:
                        journal.append(item.key, item.record)
                        metrics.count(item, time.monotonic() - began)
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
        """Of the input, and those that were answered before. Raises BatchError."""
        num_found = 0
        for line in read_lines(self.source, key):
            metrics.n_lines += 1
            num_found += journal.is_answered(line.key)
        if num_found < journal.n_answered:
            raise BatchError(
                f"{journal.out.name} answers {journal.n_answered} lines, of which the input "
                f"has {num_found}: {journal.begin_anew}"
            )
        metrics.n_answered = metrics.n_before = num_found

    def _check_apart(self) -> None:
        real = os.path.realpath(self.out)
        for path in (self.out, *(Path(real + ending) for ending in MADE_IN)):
            if path.exists() and path.samefile(self.source):
                raise BatchError(f"{path} is the input: name another output file")
