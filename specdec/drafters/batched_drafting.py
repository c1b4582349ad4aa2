"""Running the drafts of several sequences together: one pass of the model for a level of all of them.

What a drafter has a model compute is *yielded*, as rows of its text's sequence, and it is sent the
scores. So the loop here decides what shares a pass, and a drafter reads like one of a single text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from backends.contract.sequence import SequenceInput, SequenceOutput

T = TypeVar("T")

DraftSteps = Generator[SequenceInput, SequenceOutput | None, T]
"""Yields rows to compute, is sent their scores (None where the KV cache has no room for them), and
returns what it came to."""


def run_steps(steps: DraftSteps[T]) -> T:
    """One text's steps, to their end."""
    return run_batched([steps])[0]  # type: ignore[return-value]  # nothing stops them


def run_batched(
    all_steps: Sequence[DraftSteps[T]],
    should_stop: Callable[[], bool] = lambda: False,
    max_num_tokens: int | None = None,
) -> list[T | None]:
    """Run these together, and return what each came to; None for one that was stopped before.

    should_stop: asked before each pass.
    max_rows: of a pass; more rows go in several.
    """
    result: list[T | None] = [None] * len(all_steps)
    waiting: dict[int, SequenceInput] = {}

    def go_on(index: int, scores: SequenceOutput | None) -> None:
        try:
            waiting[index] = all_steps[index].send(scores)
        except StopIteration as end:
            waiting.pop(index, None)
            result[index] = end.value

    try:
        for index in range(len(all_steps)):
            go_on(index, None)
        while waiting and not should_stop():
            for batch in _batches(waiting, max_num_tokens):
                scores = _run([waiting[index] for index in batch])
                for index, its_scores in zip(batch, scores, strict=True):
                    go_on(index, its_scores)
    finally:
        for steps in all_steps:
            steps.close()
    return result


def _batches(waiting: dict[int, SequenceInput], max_num_tokens: int | None) -> list[list[int]]:
    """Which of them share a pass: those of one model, up to so many rows."""
    batches: list[list[int]] = []
    num_tokens = 0
    for index, rows in waiting.items():
        before = waiting[batches[-1][0]] if batches else None
        num_tokens += len(rows.token_ids)
        is_new = before is None or before.kv.backend is not rows.kv.backend
        if is_new or (max_num_tokens is not None and num_tokens > max_num_tokens):
            batches.append([])
            num_tokens = len(rows.token_ids)
        batches[-1].append(index)
    return batches


def _run(batch: list[SequenceInput]) -> list[SequenceOutput | None]:
    """A pass over as many of these, from the first on, as the KV cache has room for."""
    backend = batch[0].kv.backend
    n_fitting = backend.n_fitting(batch)
    scores: list[SequenceOutput | None] = []
    if n_fitting:
        scores += backend.forward(batch[:n_fitting])
    return scores + [None] * (len(batch) - n_fitting)
