"""StatsRecorder: statistics of one generation while it runs, and events of a recording."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offload.trace import record_since, recorded
from specdec.metrics.stats import (
    ACCEPT,
    DRAFT,
    PASS,
    PREFILL,
    EngineStats,
    GenerationStats,
    MeasuredPass,
    percentile,
)
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

_OF_ALL = {
    "reused_prompt_tokens": "reused_prompt_tokens",
    "generated_tokens": "generated_tokens",
    "passes": "sequence_passes",
    "drafted_tokens": "drafted_tokens",
    "accepted_tokens": "accepted_tokens",
    "ngram_hits": "ngram_hits",
    "queue_seconds": "queue_seconds",
    "time_to_first_token": "first_token_seconds",
}
"""Counts of a generation by their name in EngineStats; the rest belong to a whole step."""


class Totals:
    """Running sums over all generations of a loaded model.

    One thread at a time adds to them; any thread may read them.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Any] = {}
        self._accepted_at: Counter[int] = Counter()

    def add(self, **counts: float) -> None:
        """Add to fields of EngineStats."""
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count

    def add_accepted(self, depth: int) -> None:
        """Count a step that accepted guesses down to this depth."""
        self._accepted_at.update(range(1, depth + 1))

    def stats(self) -> EngineStats:
        """Return the statistics so far."""
        accepted_at = self._accepted_at.copy()
        depth = max(accepted_at, default=0)
        by_depth = tuple(accepted_at[n] for n in range(1, depth + 1))
        return EngineStats(**self._counts.copy(), accepted_by_depth=by_depth)


class StatsRecorder:
    """Statistics of one generation while it runs, which are added to `totals` as well.

    `clock` gives seconds. The request begins when the recorder is made; call `record_first_token`
    after the prefill, and `record_step` after every step.
    """

    def __init__(
        self,
        prompt_tokens: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        totals: Totals | None = None,
    ) -> None:
        self.clock = clock
        self._totals = totals or Totals()
        self._counts: dict[str, Any] = defaultdict(int, prompt_tokens=prompt_tokens)
        self._first: float | None = None
        # Of the last pass, and of the drafting beside it: (began, ended).
        self._last_pass = self._last_ahead = (0.0, 0.0)
        self._is_ahead_open = False  # drafting ran beside a pass whose outcome is not known yet
        self._pass_times: list[MeasuredPass] = []
        self._token_seconds: list[float] = []
        self._tried: Counter[int] = Counter()  # by depth
        self._accepted_at: Counter[int] = Counter()
        self._last = self._scheduled = (
            clock()
        )  # when the last tokens came; at first, when the request did
        self._made = time.perf_counter()  # for a recording, whatever the clock

    @property
    def waited_seconds(self) -> float:
        """Seconds since the last tokens came; since the request began if there were none."""
        return self.clock() - self._last

    def record_scheduled(self) -> None:
        """Note that the sequence is scheduled for the first time; before, it was queued."""
        if self._first is None and not self._counts["queue_seconds"]:
            self._add(queue_seconds=self.clock() - self._last)
            self._scheduled = self.clock()

    @property
    def seconds_since_scheduled(self) -> float:
        return self.clock() - self._scheduled

    def record_first_token(self, n_reused: int = 0) -> None:
        """Note the first token of a prompt of which `n_reused` tokens were cached.

        Call it once for each sequence of the prompt.
        """
        now = self.clock()
        if self._first is None:
            self._first = now
            self._add(reused_prompt_tokens=n_reused, time_to_first_token=now - self._last)
            self._totals.add(prompt_tokens=self._counts["prompt_tokens"], first_tokens=1)
        else:
            self._token_seconds.append(now - self._last)
        self._last = now
        self._add(generated_tokens=1)
        record_since(self._made, PREFILL, f"prompt of {self._counts['prompt_tokens']}")

    @recorded(DRAFT, "draft")
    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the time of the block as draft_seconds."""
        began = self.clock()
        try:
            yield
        finally:
            self._add(draft_seconds=self.clock() - began)

    @recorded(PASS, "pass")
    @contextmanager
    def verifying(
        self, num_tokens: int = 1, *, is_drafting_ahead: bool = False, has_pinned: bool = False
    ) -> Iterator[None]:
        """Count the time of the block as pass_seconds: a pass of `num_tokens`.

        is_drafting_ahead: another thread drafts meanwhile (`drafting_ahead`).
        has_pinned: see MeasuredPass.
        """
        began = self.clock()
        try:
            yield
        finally:
            ended = self.clock()
            self._add(pass_seconds=ended - began)
        self._add(batch_tokens=num_tokens)
        self._last_pass = (began, ended)
        self._pass_times.append(
            MeasuredPass(num_tokens, ended - began, is_drafting_ahead, has_pinned)
        )

    @recorded(DRAFT, "draft ahead")
    @contextmanager
    def drafting_ahead(self) -> Iterator[None]:
        """Time a block that drafts in another thread beside a pass; see `record_outcome`."""
        began = self.clock()
        try:
            yield
        finally:
            self._last_ahead = (began, self.clock())
            self._is_ahead_open = True

    def record_outcome(self, *, was_ahead: bool) -> None:
        """Note the end of a pass and of the drafting beside it, if there was any.

        was_ahead: the drafter had run the token that the target chose while a pass ran.
        """
        if not self._is_ahead_open:
            return
        self._is_ahead_open = False
        (pass_began, pass_ended), (began, ended) = self._last_pass, self._last_ahead
        self._add(
            draft_ahead_hits=int(was_ahead),
            draft_ahead_misses=int(not was_ahead),
            draft_seconds=ended - began,
            overlapped_draft_seconds=max(0.0, min(pass_ended, ended) - max(pass_began, began)),
        )

    def record_step(
        self, tree: DraftTree, acceptance: Acceptance, n_emitted: int | None = None
    ) -> None:
        """Count a pass that verified `tree` and emitted `n_emitted` tokens.

        `n_emitted` is by default all of them; it is smaller where a stop string cuts the step.
        """
        now = self.clock()
        n_tokens = acceptance.n_accepted + 1 if n_emitted is None else n_emitted
        accepted = acceptance.path[1 : n_tokens + 1]  # those that reached the caller
        is_whole = n_tokens > acceptance.n_accepted
        self._add(
            generated_tokens=n_tokens,
            passes=1,
            drafted_tokens=tree.n_drafted,
            draft_runs=tree.n_runs,
            accepted_tokens=len(accepted),
            ngram_hits=sum("ngram" in tree.sources[i] for i in accepted),
            bonus_tokens=int(acceptance.is_bonus and tree.n_drafted > 0 and is_whole),
        )
        self._accepted_at.update(range(1, len(accepted) + 1))
        self._totals.add_accepted(len(accepted))
        self._tried.update(range(1, len(accepted) + 1))
        guesses = tree.children(acceptance.path[-1])
        # A right guess at the end of the path was left out for the length's sake.
        if is_whole and guesses and acceptance.next_token not in guesses:
            self._tried[len(accepted) + 1] += 1
        # Tokens of a step arrive together: each is charged an equal share of the step.
        self._token_seconds.extend([(now - self._last) / max(n_tokens, 1)] * n_tokens)
        self._last = now
        name = f"{acceptance.n_accepted} of {tree.n_drafted} accepted"
        record_since(time.perf_counter(), ACCEPT, name)

    def stats(self) -> GenerationStats:
        """Return the statistics so far, without those that only backends and the system know."""
        slowed, unslowed = self._compared_pass_seconds()
        return GenerationStats(
            **self._counts.copy(),
            decode_seconds=0.0 if self._first is None else self._last - self._first,
            time_per_output_token_p90=percentile(self._token_seconds, 0.9),
            slowed_pass_seconds=slowed,
            unslowed_pass_seconds=unslowed,
            tried_by_depth=self._at_depths(self._tried),
            accepted_by_depth=self._at_depths(self._accepted_at),
            pass_times=tuple(self._pass_times),
        )

    def _add(self, **more: float) -> None:
        """Add to these counts."""
        for name, value in more.items():
            self._counts[name] += value
        self._totals.add(**{_OF_ALL[name]: more[name] for name in more if name in _OF_ALL})

    def _at_depths(self, counts: Counter[int]) -> tuple[int, ...]:
        return tuple(counts[depth] for depth in range(1, max(self._tried, default=0) + 1))

    def _compared_pass_seconds(self) -> tuple[float, float]:
        """Seconds of the passes with drafting beside them, and of as many without; of those sizes
        of which there are both."""
        seconds_by_size: dict[tuple[int, bool], list[float]] = defaultdict(list)
        for item in self._pass_times:
            seconds_by_size[item.num_tokens, item.is_drafting_ahead].append(item.seconds)
        slowed = unslowed = 0.0
        for (num_tokens, is_slowed_by_reads), seconds in seconds_by_size.items():
            alone = seconds_by_size.get((num_tokens, False))
            if is_slowed_by_reads and alone:
                slowed += sum(seconds)
                unslowed += len(seconds) * sum(alone) / len(alone)
        return slowed, unslowed
