"""Output of the target itself as text to train on.

Draft tokens are accepted where they are the target's, and its own output differs from the text that
it continues. So the target continues beginnings of the text for a while, half of them greedily.
A beginning is half a sequence: after a short one a target may write another kind of text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specdec.api import LLM
from specdec.run_options import RunOptions
from specdec.sampling.params import SamplingParams
from specdec.traces.format import INDEX
from specdec.traces.reader import Traces

SAMPLED_TEMPERATURE = 0.7
_MAX_BYTES = 2**40
_COMPLETE = "complete"


def generated_sequences(
    options: RunOptions,
    documents: Sequence[Sequence[int]],
    folder: Path,
    *,
    length: int,
    minutes: float,
    progress: Callable[[float], None] = lambda share: None,
) -> list[list[int]]:
    """Return beginnings of `documents` and the target's continuations, of at most `length` tokens.

    They are kept in `folder`, where an interrupted call leaves what it has; a later one goes on.

    Args:
        options: target, and a draft model to generate with.
    """
    has_some = (folder / INDEX).exists()
    if not (folder / _COMPLETE).exists():
        n_done = len(Traces(folder)) if has_some else 0
        _generate(options, documents[n_done:] or documents, folder, length, minutes, progress)
        (folder / _COMPLETE).touch()
    traces = Traces(folder)
    return [traces.token_ids(number).tolist() for number in range(len(traces))]


def _generate(
    options: RunOptions,
    documents: Sequence[Sequence[int]],
    folder: Path,
    length: int,
    minutes: float,
    progress: Callable[[float], None],
) -> None:
    deadline = time.monotonic() + 60 * minutes

    def requests() -> Iterator[tuple[list[int], SamplingParams]]:
        for number, document in enumerate(documents):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            progress(1 - left / (60 * minutes))
            prompt = list(document[: length // 2])
            temperature = SAMPLED_TEMPERATURE if number % 2 else 0.0
            yield (
                prompt,
                SamplingParams(
                    max_tokens=length - len(prompt), temperature=temperature, seed=number
                ),
            )

    recording = replace(options, ctx_size=length, record_traces=folder, max_traces=_MAX_BYTES)
    with LLM(recording) as llm:
        for _, result in llm.generate_each(requests()):
            if isinstance(result, Exception):
                raise result


def interleaved(first: list[list[int]], second: list[list[int]]) -> list[list[int]]:
    """Return both lists with the second one spread evenly over the first: each part of the result
    has about the same share of both."""
    places = [(i + 0.5) / len(first) for i in range(len(first))]
    places += [(i + 0.5) / len(second) for i in range(len(second))]
    both = first + second
    return [both[i] for i in sorted(range(len(both)), key=places.__getitem__)]
