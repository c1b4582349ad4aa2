"""Generations in other threads that pause where a test wants them to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from specdec.api import LLM

PROMPT = [5, 6, 7]


class Pinned:
    """A logits processor that waits at its third call until it is released."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self._n_calls = 0
        self._then = then

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._n_calls += 1
        if self._n_calls == 3:
            self.reached.set()
            self._then()
            self.may_go_on.wait()
        return scores


class Generation(threading.Thread):
    """A generation in another thread, with its error if it had one."""

    def __init__(self, llm: LLM, processor: Pinned) -> None:
        super().__init__()
        self.error: BaseException | None = None
        self._llm, self._processor = llm, processor
        self.start()
        processor.reached.wait()

    def run(self) -> None:
        try:
            self._llm.generate(PROMPT, max_tokens=200, logits_processors=[self._processor])
        except BaseException as error:
            self.error = error


class Reader(threading.Thread):
    """A reader of a stream, with its chunks and its error if it had one."""

    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.chunks: list[Any] = []
        self.error: BaseException | None = None
        self._stream = stream
        self.start()

    def run(self) -> None:
        try:
            self.chunks.extend(self._stream)
        except BaseException as error:
            self.error = error
