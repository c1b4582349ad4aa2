"""Request: a caller's prompt and parameters, and the queue of its output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import Any

from backends.contract.backend import TransferStats
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.engine.sequences.outputs import PromptProgress, StreamChunk
from specdec.metrics.recorder import StatsRecorder
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams


class Request:
    """One generation, as a caller requested it.

    Args:
        processors: the caller's own logits processors.
        cache_prompt: whether KV of other sequences may be used.
        priority: larger ones are scheduled first.
        drafter: the caller's own, in place of the drafters that `spec` names; it serves one
            sequence after the other.

    Attributes:
        output: chunks, and None at the end.
        on_output: called by the engine's thread when something was put in `output`, and when the
            prompt has made progress.
        streams_output: whether a reader takes chunks as they come, and so notices gaps.
        is_cancelled: whether the caller wants no more of it; any thread may set it.
        error: the first error, which ended it.
        stats: statistics, once it has finished.
        progress: of its prompt; None until it is scheduled.
        use_before: the target's traffic before it began.
        is_replanned: whether the models were loaded by another plan meanwhile.
        drafting_index: index of the sequence that a caller's own drafter serves.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        spec: SpecConfig,
        *,
        processors: Sequence[Any] = (),
        cache_prompt: bool = True,
        priority: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.prompt_ids, self.params, self.spec = prompt_ids, params, spec
        self.processors, self.drafter = processors, drafter
        self.cache_prompt, self.priority = cache_prompt, priority
        self.output: SimpleQueue[StreamChunk | None] = SimpleQueue()
        self.on_output: Callable[[], None] = lambda: None
        self.streams_output, self.is_cancelled = True, False
        self.error: BaseException | None = None
        self.stats: GenerationStats | None = None
        self.progress: PromptProgress | None = None
        self.use_before: TransferStats | None = None
        self.recorder = StatsRecorder(len(prompt_ids))
        self.is_replanned = False
        self.drafting_index = 0
        self._num_starts = count()  # its `next` is atomic
        self._finished = threading.Event()

    def claim_start(self) -> bool:
        """Return True to the first caller only, who then starts the request."""
        return next(self._num_starts) == 0

    def put(self, chunk: StreamChunk | None) -> None:
        """Hand a chunk to the caller; None marks the end."""
        self.output.put(chunk)
        with own_errors(self):
            self.on_output()

    def note_progress(self, progress: PromptProgress) -> None:
        """Tell the caller of the prompt's progress."""
        self.progress = progress
        with own_errors(self):
            self.on_output()

    def fail(self, error: BaseException) -> None:
        """End all of its sequences with an error; only the first error is kept."""
        if isinstance(error, StopIteration | StopAsyncIteration):
            # A reader's loop would take it for the end of the output (as in PEP 479).
            cause, error = error, RuntimeError(f"{type(error).__name__} was raised inside a step")
            error.__cause__ = cause
        self.error = self.error or error

    @property
    def is_aborted(self) -> bool:
        """Whether it was cancelled or failed, so that its sequences end at the next step."""
        return self.is_cancelled or self.error is not None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is computed; unread chunks may be left."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it has finished; return False at a timeout."""
        return self._finished.wait(timeout_seconds)

    def finish(self) -> None:
        """Mark it finished and wake whoever waits for it. Idempotent."""
        if not self.is_finished:
            self._finished.set()
            self.put(None)

    def take_error(self) -> BaseException | None:
        """Return and clear the error that ended it; None where it was cancelled."""
        error, self.error = self.error, None
        return None if self.is_cancelled else error


@contextmanager
def own_errors(request: Request) -> Iterator[None]:
    """Let an error in the block fail only this request: the code may be a caller's own."""
    try:
        yield
    except BaseException as error:  # SystemExit too: in this thread it ends nothing
        request.fail(error)
