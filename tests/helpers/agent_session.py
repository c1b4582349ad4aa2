"""A long session beside short requests, and how much of each turn's prefix is reused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import specdec
from backends.contract import prefix_files
from specdec.api import LLM, GenerationResult
from specdec.engine.scheduler import Scheduler
from specdec.policy.cost_model import CostModel
from specdec.sampling.params import SamplingParams

ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)
SHORT = SamplingParams(max_tokens=4, ignore_eos=True)


def prompt(num_tokens: int, step: int, vocab_size: int = 90) -> list[int]:
    return [5 + (i * step + i * i) % (vocab_size - 5) for i in range(num_tokens)]


@dataclass
class AgentSession:
    """Turns that each begin with all of the earlier ones, and bursts of short requests.

    Attributes:
        shares: of each turn but the first, reused tokens / tokens of the turns before.
        results: answers, short ones included.
    """

    num_start_tokens: int
    num_turns: int = 30
    num_short: int = 50
    shares: list[float] = field(default_factory=list)
    results: list[GenerationResult] = field(default_factory=list)

    def run(self, llm: LLM, **options: Any) -> list[tuple[int, ...]]:
        """Return the tokens of all answers."""
        self.shares, self.results = [], []
        ids, num_before, num_done = prompt(self.num_start_tokens, 7), 0, 0
        for turn in range(self.num_turns):
            result = llm.generate(ids, ANSWER, **options)
            self.results.append(result)
            if num_before:
                self.shares.append(result.stats.reused_prompt_tokens / num_before)
            num_before = len(ids) + len(result.token_ids) - 1  # the last one was never run
            ids = [*ids, *result.token_ids, *prompt(12, 3 + turn)]
            if turn % 6 == 0:
                num_next = min(self.num_short, num_done + 10)
                short = [prompt(30 + i, 11 + i) for i in range(num_done, num_next)]
                self.results += llm.generate(short, SHORT, **options)
                num_done = num_next
        assert num_done == self.num_short
        return [result.token_ids for result in self.results]


def always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file pay for any tokens: tiny models compute faster than a disk is assumed to be, and
    measured on a busy machine 20 tokens may take no longer than one."""
    monkeypatch.setattr(CostModel, "extra_seconds", lambda self, num_tokens: float(num_tokens))
    monkeypatch.setattr(prefix_files, "FILE_SECONDS", 0.0)
    monkeypatch.setattr(prefix_files.PrefixFiles, "read_seconds", lambda self, n_bytes: 0.0)


def cost_by_tokens(llm: LLM) -> None:
    """Make the cost of a prefix its number of tokens: planned ones depend on the machine."""
    kv = llm.session.engine.scheduler.kv  # type: ignore[union-attr]
    for cache in (kv.cache, llm.session.models.draft_prefix_cache):
        if cache is not None:
            cache.seconds = float


def load(model: Path, folder: Path | None, **options: Any) -> LLM:
    llm = specdec.load(model, prompt_cache_dir=folder, threads=1, **options)
    cost_by_tokens(llm)
    return llm


def wait_for_files(llm: LLM) -> None:
    """Wait until the engine, which answers first, has written its files."""
    llm.session.engine.call(lambda: None)


def files_of(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("*.safetensors"))


def cut_off(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    token_ids: list[int],
    chunk: int,
    num_passes: int,
    how: str = "is cancelled",
) -> None:
    """End a prompt that is computed in passes of `chunk` tokens in the pass after `num_passes`, so
    that it "is cancelled" or "fails"."""
    monkeypatch.setattr(Scheduler, "_max_prompt_tokens", lambda self: chunk)
    forward, lengths = llm.target.forward, []

    def noted(batch: Any) -> Any:
        lengths.append(sum(len(item.token_ids) for item in batch))
        if len(lengths) > num_passes:
            if how == "fails":
                raise OSError("the disk is gone")
            llm.session.engine.cancel(stream._request)
        return forward(batch)

    with monkeypatch.context() as patch:
        patch.setattr(llm.target, "forward", noted)
        stream = llm.stream(token_ids, ANSWER)
        if how == "fails":
            with pytest.raises(OSError, match="disk is gone"):
                list(stream)
        else:
            list(stream)
    assert len(lengths) == num_passes + 1
    assert max(lengths) <= chunk
