"""Request: a prompt and parameters as a caller gave them, and the queue of what comes of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import Any

from backends.contract.backend import StreamUse
from specdec.config import SpecConfig
from specdec.drafters.base import Drafter
from specdec.engine.outputs import StreamChunk
from specdec.metrics.recorder import StatsRecorder
from specdec.metrics.stats import GenerationStats
from specdec.sampling.params import SamplingParams


class Request:
    """One generation, as a caller asked for it.

    Args:
        processors: a caller's own logits processors.
        cache_prompt: whether KV of other sequences may be used.
        priority: larger ones are scheduled first.
        drafter: a caller's own, in place of those that `spec` names; it serves one sequence after
            the other.

    Attributes:
        output: chunks, and None at the end.
        on_output: called by the engine's thread when there is something in `output`.
        is_streamed: somebody reads the chunks as they come, so that gaps are noticed.
        is_cancelled: nobody wants any more of it; any thread may set it.
        error: what ended it.
        stats: figures, once it has finished.
        use_before: the target's traffic before it began.
        drafting_index: which of its sequences a caller's own drafter serves.
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
        self.is_streamed, self.is_cancelled = True, False
        self.error: BaseException | None = None
        self.stats: GenerationStats | None = None
        self.use_before: StreamUse | None = None
        self.recorder = StatsRecorder(len(prompt_ids))
        self.drafting_index = 0
        self._num_starts = count()  # its `next` is atomic
        self._finished = threading.Event()

    def claim_start(self) -> bool:
        """Return True to the first caller alone, who is to start it."""
        return next(self._num_starts) == 0

    def put(self, chunk: StreamChunk | None) -> None:
        """Hand a chunk to the caller; None: the end."""
        self.output.put(chunk)
        self.on_output()

    def fail(self, error: BaseException) -> None:
        """Let all of its sequences end; the first error counts."""
        self.error = self.error or error

    @property
    def is_aborted(self) -> bool:
        """Whether its sequences end, at whatever point they are."""
        return self.is_cancelled or self.error is not None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more is computed; chunks may be left."""
        return self._finished.is_set()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until it has finished; whether it has."""
        return self._finished.wait(timeout_seconds)

    def finish(self) -> None:
        """Let nobody wait for it any more. Idempotent."""
        if not self.is_finished:
            self._finished.set()
            self.put(None)

    def take_error(self) -> BaseException | None:
        """Return what ended it, once; None where it was cancelled."""
        error, self.error = self.error, None
        return None if self.is_cancelled else error


@contextmanager
def own_errors(request: Request) -> Iterator[None]:
    """Let an error in the block end this request and no other one: a drafter may be a caller's."""
    try:
        yield
    except Exception as error:
        request.fail(error)
