"""Budgets that change in the midst of texts, at given numbers of tokens."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offload.budget import BudgetExceeded
from offload.units import MIB
from specdec.api import LLM
from specdec.planning.run_plan import RunPlan


def grow(path: Path, *more: str) -> Path:
    """Write a model with 440 MB of float32 weights, by `specdec-bench synth`."""
    from bench.commands.app import main

    argv = ["synth", "--size", "440MB", "--vocab-size", "4096", "--dtype", "fp32"]
    assert main([*argv, "-o", str(path), *more]) == 0
    return path


class Changes:
    """A logits processor that changes the budget before the next step.

    budgets: one for each of the times, as MiB above `smallest_bytes`.
    at: numbers of new tokens at which it is changed.

    Attributes:
        outcomes: a plan or an error for each change.
        targets: the loaded target after each change.
    """

    def __init__(
        self, llm: LLM, smallest_bytes: int, budgets: Sequence[int], at: Sequence[int]
    ) -> None:
        self._llm, self._smallest_bytes = llm, smallest_bytes
        self._changes = list(zip(at, budgets, strict=True))
        self._num_prompt_tokens = 0
        self._threads: list[threading.Thread] = []
        self.outcomes: list[RunPlan | Exception] = []
        self.targets: list[Any] = []

    def __call__(self, ids: Any, scores: Any) -> Any:
        self._num_prompt_tokens = self._num_prompt_tokens or ids.shape[1]
        num_new = ids.shape[1] - self._num_prompt_tokens
        while self._changes and num_new >= self._changes[0][0]:
            _, more_mib = self._changes.pop(0)
            self._queue(self._smallest_bytes + more_mib * MIB)
        return scores

    def _queue(self, budget_bytes: int) -> None:
        """Send the change, and wait in the engine's thread until it is in its inbox."""
        inbox = self._llm.session.engine._inbox
        num_before = inbox.qsize()
        thread = threading.Thread(target=self._change, args=[budget_bytes])
        self._threads.append(thread)
        thread.start()
        while inbox.qsize() == num_before and thread.is_alive():
            time.sleep(0.001)

    def _change(self, budget_bytes: int) -> None:
        try:
            self.outcomes.append(self._llm.set_memory_budget(budget_bytes))
        except Exception as error:
            self.outcomes.append(error)
        self.targets.append(self._llm.target)

    def finish(self) -> None:
        """Wait for all of them, and check that they came."""
        for thread in self._threads:
            thread.join(60)
        assert not self._changes, "the text was too short"


def smallest_budgets(llm: LLM) -> tuple[int, int]:
    """Return the smallest budgets in bytes of a loaded run without its draft, and with it.

    Another plan of this process would count memory that other tests left, or not.
    """
    with pytest.raises(BudgetExceeded) as refusal:
        llm.set_memory_budget("8MiB")
    sizes = re.findall(r"(?:works is|draft it is) (\d+) MiB", str(refusal.value))
    return int(sizes[0]) * MIB, int(sizes[-1]) * MIB
