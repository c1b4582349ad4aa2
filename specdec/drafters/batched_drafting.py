"""Batched drafting: one pass of the draft model computes a tree level of several sequences.

A drafter is a generator: it yields the tokens to compute, and is sent their scores. The loop here
batches the inputs of all drafters, and each drafter reads as if it served a single sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from backends.contract.sequence import SequenceInput, SequenceOutput

T = TypeVar("T")

DraftSteps = Generator[SequenceInput, SequenceOutput | None, T]
"""Generator that yields tokens to compute, is sent their scores (None if the KV cache has no
capacity), and returns its result."""


def run_steps(steps: DraftSteps[T]) -> T:
    """Run one sequence's steps to their end, and return the result."""
    return run_batched([steps])[0]  # type: ignore[return-value]  # nothing stops them


def run_batched(
    all_steps: Sequence[DraftSteps[T]],
    should_stop: Callable[[], bool] = lambda: False,
    max_num_tokens: int | None = None,
) -> list[T | None]:
    """Run several sequences' steps in shared passes; return their results, None for stopped ones.

    should_stop: called before each pass.
    max_num_tokens: maximum tokens of a pass; more are split into several.
    """
    results: list[T | None] = [None] * len(all_steps)
    waiting: dict[int, SequenceInput] = {}

    def go_on(index: int, scores: SequenceOutput | None) -> None:
        try:
            waiting[index] = all_steps[index].send(scores)
        except StopIteration as end:
            waiting.pop(index, None)
            results[index] = end.value

    try:
        for index in range(len(all_steps)):
            go_on(index, None)
        while waiting and not should_stop():
            for batch in _batches(waiting, max_num_tokens):
                scores = _run([waiting[index] for index in batch])
                for index, output in zip(batch, scores, strict=True):
                    go_on(index, output)
    finally:
        for steps in all_steps:
            steps.close()
    return results


def _batches(waiting: dict[int, SequenceInput], max_num_tokens: int | None) -> list[list[int]]:
    """Group inputs that share a pass: inputs of one model, with `max_num_tokens` at most. A draft
    head takes the target's hidden states and its own, which are narrower, in different passes."""
    batches: list[list[int]] = []
    num_tokens = 0
    for index, chunk in waiting.items():
        before = waiting[batches[-1][0]] if batches else None
        num_tokens += len(chunk.token_ids)
        is_new = before is None or _model_input(before) != _model_input(chunk)
        if is_new or (max_num_tokens is not None and num_tokens > max_num_tokens):
            batches.append([])
            num_tokens = len(chunk.token_ids)
        batches[-1].append(index)
    return batches


def _model_input(chunk: SequenceInput) -> tuple[int, int]:
    """Return (the model, the width of the hidden states that it is given)."""
    states = chunk.hidden_states
    return id(chunk.kv.backend), 0 if states is None else states.shape[1]


def _run(batch: list[SequenceInput]) -> list[SequenceOutput | None]:
    """Run a pass over the first inputs that fit in the KV cache; the others' scores are None."""
    backend = batch[0].kv.backend
    n_fitting = backend.n_fitting(batch)
    scores: list[SequenceOutput | None] = []
    if n_fitting:
        scores += backend.forward(batch[:n_fitting])
    return scores + [None] * (len(batch) - n_fitting)
