"""Generations for many prompts at a time, which share passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from typing import Any

from offload.errors import SpecdecError
from specdec.checks import ConfigError
from specdec.engine.sequences.outputs import GenerationResult
from specdec.engine.stream import GenerationStream
from specdec.grammar.state import GrammarError
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import SamplingError
from specdec.text.chat_format import ChatTemplateError
from specdec.text.contract import TokenizerError
from specdec.text.prompts import Prompt, PromptError

REQUEST_ERRORS = (
    ChatTemplateError,
    ConfigError,
    GrammarError,
    PromptError,
    SamplingError,
    TokenizerError,
)
"""Errors that concern one request only."""


def generate_all(new_streams: Iterable[GenerationStream]) -> list[GenerationResult]:
    """Generate to the end of all; an error of one, in its arguments too, cancels the others."""
    with ExitStack() as stack:
        streams = []
        for stream in new_streams:
            streams.append(stream)
            stack.callback(stream.cancel)
        for stream in streams:
            stream.start(streams_output=False)
        for stream in streams:
            for _ in stream:
                pass
        return [stream.result for stream in streams]


def generate_each(
    requests: Iterable[tuple[Prompt, SamplingParams]],
    new_stream: Callable[[Prompt, SamplingParams | None], GenerationStream],
    max_running: Callable[[], int],
) -> Iterator[tuple[int, GenerationResult | SpecdecError]]:
    """Yield (index of the request, its result or own error) as each is finished.

    An error that concerns all of them is raised.

    max_running: returns how many requests may be unfinished; another memory budget changes it.
    """
    numbered, running = enumerate(requests), dict[int, GenerationStream]()
    changed = SimpleQueue[int]()
    is_at_end = False
    try:
        while running or not is_at_end:
            while len(running) < max_running() and not is_at_end:
                if (next_request := next(numbered, None)) is None:
                    is_at_end = True
                    break
                index, request = next_request
                try:
                    running[index] = new_stream(*_checked_pair(request))
                except REQUEST_ERRORS as error:
                    yield index, error
                else:
                    on_output = partial(changed.put, index)
                    running[index].start(streams_output=False, on_output=on_output)
            if running:
                index = changed.get()
                stream = running.get(index)  # None: a late wake-up of a finished stream
                if stream is not None and stream.is_over:
                    yield index, _outcome(running.pop(index))
    finally:
        for stream in running.values():
            stream.cancel()


def _checked_pair(request: Any) -> tuple[Prompt, SamplingParams | None]:
    if not isinstance(request, (tuple, list)) or len(request) != 2:
        raise ConfigError(f"a request is {request!r:.50}, must be (prompt, sampling parameters)")
    return request[0], request[1]


def _outcome(stream: GenerationStream) -> GenerationResult | SpecdecError:
    """Return the result or own error of a finished stream; raise errors that concern others too."""
    error = stream.take_error()
    if error is None:
        return stream.result
    if isinstance(error, REQUEST_ERRORS):
        return error
    raise error
