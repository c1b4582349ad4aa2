"""What one generation did and what it cost. Every figure's convention is stated at its formula.

A *round* is draft, one decode pass of the target, acceptance. The prompt's pass (prefill) yields
the first token and is no decode pass: it counts in the time to first token and nowhere else.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from offload.trace import record_since, recorded
from specdec.acceptance import Acceptance
from specdec.tree import DraftTree

PREFILL, PASS, DRAFT, ACCEPT = "prefill", "pass", "draft", "accept"
"""Kinds of events in a recording (offload.trace): of the prompt, and a round's three parts. That of
acceptance marks its end."""


@dataclass(frozen=True)
class GenerationStats:
    """Raw counts of one generation; rates are properties, so that they cannot disagree.

    The bytes and seconds of the streamer and the memory figures are 0 where nobody reported them.
    """

    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0  # whose KV the target still held from an earlier generation
    generated_tokens: int = 0  # the first one, from the prefill, included
    passes: int = 0  # decode passes of the target
    drafted_tokens: int = 0  # nodes that passes verified, roots not counted
    accepted_tokens: int = 0
    ngram_hits: int = 0  # accepted tokens that an n-gram proposed, alone or with the draft model
    bonus_tokens: int = 0  # rounds that ended at a leaf of a non-empty tree
    time_to_first_token: float = 0.0  # seconds; prefill included, loading excluded
    decode_seconds: float = 0.0  # from the first token to the last
    time_per_output_token_p90: float = 0.0  # seconds
    pass_seconds: float = 0.0  # inside decode passes
    draft_seconds: float = 0.0  # inside drafters, hidden or not
    overlapped_draft_seconds: float = 0.0  # of draft_seconds, those in which a pass ran as well
    draft_ahead_hits: int = 0  # passes with drafting beside them whose outcome had been drafted:
    # the draft had run the target's next token, so the next tree began with its candidates
    draft_ahead_misses: int = 0  # the other passes with drafting beside them
    slowed_pass_seconds: float = 0.0  # see pass_slowdown
    unslowed_pass_seconds: float = 0.0
    stall_seconds: float = 0.0  # passes waiting for storage
    bytes_streamed: int = 0
    peak_memory_bytes: int = 0
    memory_budget_bytes: int = 0
    kv_bytes: int = 0  # allocated for KV caches
    kv_used_fraction: float = 0.0  # of kv_bytes, at the end
    is_lossless: bool = True  # False: draft tokens were put up with (accept_threshold)
    tried_by_depth: tuple[int, ...] = ()  # rounds whose walk came to have a guess at depth 1, 2, ..
    accepted_by_depth: tuple[int, ...] = ()  # rounds where one of these guesses was right

    @property
    def tokens_per_second(self) -> float:
        """Decode only: tokens after the first, divided by the time after the first."""
        return ratio(self.generated_tokens - 1, self.decode_seconds)

    @property
    def time_per_output_token(self) -> float:
        """Seconds per token after the first (mean); the inverse of tokens_per_second."""
        return ratio(self.decode_seconds, self.generated_tokens - 1)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decode pass: 1 + accepted / passes (the recovered or bonus token counts)."""
        return 1.0 + ratio(self.accepted_tokens, self.passes)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted. In a tree at most one branch can be accepted, so wide trees score
        low here and high in mean_acceptance_length."""
        return ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def flops_rejected_fraction(self) -> float:
        """Share of the target's decode FLOPs spent on rejected tokens.

        Rejected drafted nodes / all nodes scored in decode passes; a pass scores its drafted nodes
        and one root, and every node costs about the same.
        """
        n_scored = self.drafted_tokens + self.passes
        return ratio(self.drafted_tokens - self.accepted_tokens, n_scored)

    @property
    def pass_slowdown(self) -> float:
        """Seconds of a pass with drafting beside it / without, for the same number of rows.

        slowed_pass_seconds are those of all passes with drafting beside them whose number of rows
        was measured without as well; unslowed_pass_seconds are what as many passes take at the
        mean without. 1: drafting ahead costs the pass nothing. 0: never measured both ways.
        """
        return ratio(self.slowed_pass_seconds, self.unslowed_pass_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain figures for JSON: seconds, bytes, tokens and fractions."""
        values = {name: getattr(self, name) for name in (*RATES, *_FIELDS)}
        return values | {name: list(values[name]) for name in BY_DEPTH}


RATES = (
    "tokens_per_second",
    "time_per_output_token",
    "mean_acceptance_length",
    "acceptance_rate",
    "flops_rejected_fraction",
    "pass_slowdown",
)
"""The properties that `to_dict` reports beside all fields."""
_FIELDS = tuple(field.name for field in fields(GenerationStats))

# How the fields of several generations make those of all of them; the rates follow from these.
LARGEST = (
    "time_per_output_token_p90",  # an upper bound of the p90 of all tokens
    "peak_memory_bytes",
    "memory_budget_bytes",
    "kv_bytes",
)
AVERAGED = ("time_to_first_token", "kv_used_fraction")
TRUE_FOR_ALL = ("is_lossless",)
BY_DEPTH = ("tried_by_depth", "accepted_by_depth")
"""Summed too, depth by depth."""
_NOT_SUMMED = LARGEST + AVERAGED + TRUE_FOR_ALL + BY_DEPTH
SUMMED = tuple(name for name in _FIELDS if name not in _NOT_SUMMED)


class StatsRecorder:
    """Collects the figures of one generation while it runs.

    `clock` gives seconds. The request begins when the recorder is made; call `record_first_token`
    after the prefill, `record_round` after every round, and `finish` at the end (also of a
    cancelled generation).
    """

    def __init__(
        self, prompt_tokens: int = 0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.clock = clock
        self._first: float | None = None
        self._reused = self._generated = self._passes = self._drafted = self._accepted = 0
        self._ngram_hits = self._bonus = 0
        self._pass_seconds = self._draft_seconds = self._overlapped_seconds = 0.0
        self._ahead_hits = self._ahead_misses = 0
        # Of the last pass, and of the drafting beside it: (began, ended).
        self._last_pass = self._last_ahead = (0.0, 0.0)
        self._is_ahead_open = False  # drafting ran beside a pass whose outcome is not known yet
        # (rows, drafting beside it?) -> seconds of each such pass
        self._seconds_by_rows: dict[tuple[int, bool], list[float]] = defaultdict(list)
        self._token_seconds: list[float] = []
        self._tried: Counter[int] = Counter()  # by depth
        self._accepted_at: Counter[int] = Counter()
        self._started = self._last = clock()
        self._made = time.perf_counter()  # for a recording, whatever the clock

    def record_first_token(self, n_reused: int = 0) -> None:
        """The prompt, all but `n_reused` tokens of it computed now, has yielded the first token.

        Of further sequences of the prompt it is called once more.
        """
        now = self.clock()
        if self._first is None:
            self._first, self._reused = now, n_reused
        else:
            self._token_seconds.append(now - self._last)
        self._last = now
        self._generated += 1
        record_since(self._made, PREFILL, f"prompt of {self.prompt_tokens}")

    @recorded(DRAFT, "draft")
    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Time of the block counts as draft_seconds."""
        began = self.clock()
        try:
            yield
        finally:
            self._draft_seconds += self.clock() - began

    @recorded(PASS, "pass")
    @contextmanager
    def verifying(self, n_rows: int = 1, *, is_drafting: bool = False) -> Iterator[None]:
        """Time of the block counts as pass_seconds: a pass of `n_rows`.

        is_drafting: another thread drafts meanwhile (`drafting_ahead`).
        """
        began = self.clock()
        try:
            yield
        finally:
            ended = self.clock()
            self._pass_seconds += ended - began
        self._last_pass = (began, ended)
        self._seconds_by_rows[n_rows, is_drafting].append(ended - began)

    @recorded(DRAFT, "draft ahead")
    @contextmanager
    def drafting_ahead(self) -> Iterator[None]:
        """The block, in another thread, drafts while a pass runs; counted by `record_outcome`."""
        began = self.clock()
        try:
            yield
        finally:
            self._last_ahead = (began, self.clock())
            self._is_ahead_open = True

    def record_outcome(self, *, was_ahead: bool) -> None:
        """The pass and the drafting beside it, if there was any, are over.

        was_ahead: the drafter had already run the token that the target chose.
        """
        if not self._is_ahead_open:
            return
        self._is_ahead_open = False
        self._ahead_hits += int(was_ahead)
        self._ahead_misses += int(not was_ahead)
        (pass_began, pass_ended), (began, ended) = self._last_pass, self._last_ahead
        self._draft_seconds += ended - began
        self._overlapped_seconds += max(0.0, min(pass_ended, ended) - max(pass_began, began))

    def record_round(
        self, tree: DraftTree, acceptance: Acceptance, n_emitted: int | None = None
    ) -> None:
        """A pass verified `tree`, and `n_emitted` tokens of its outcome reached the caller.

        `n_emitted` is by default all of them; it is smaller where a stop string cuts the round.
        """
        now = self.clock()
        n_tokens = acceptance.n_accepted + 1 if n_emitted is None else n_emitted
        accepted = acceptance.path[1 : n_tokens + 1]  # those that reached the caller
        is_whole = n_tokens > acceptance.n_accepted
        self._passes += 1
        self._drafted += tree.n_drafted
        self._accepted += len(accepted)
        self._accepted_at.update(range(1, len(accepted) + 1))
        self._tried.update(range(1, len(accepted) + 1))
        guesses = tree.children(acceptance.path[-1])
        # A right guess at the end of the path was left out for the length's sake.
        if is_whole and guesses and acceptance.next_token not in guesses:
            self._tried[len(accepted) + 1] += 1
        self._ngram_hits += sum("ngram" in tree.sources[i] for i in accepted)
        self._bonus += int(acceptance.is_bonus and tree.n_drafted > 0 and is_whole)
        self._generated += n_tokens
        # Tokens of a round arrive together: each is charged an equal share of the round.
        self._token_seconds.extend([(now - self._last) / max(n_tokens, 1)] * n_tokens)
        self._last = now
        name = f"{acceptance.n_accepted} of {tree.n_drafted} accepted"
        record_since(time.perf_counter(), ACCEPT, name)

    def finish(
        self,
        *,
        bytes_streamed: int = 0,
        stall_seconds: float = 0.0,
        peak_memory_bytes: int = 0,
        memory_budget_bytes: int = 0,
        kv_bytes: int = 0,
        kv_used_fraction: float = 0.0,
        is_lossless: bool = True,
    ) -> GenerationStats:
        """The figures so far, with those that only the backend and the system know."""
        first = self._last if self._first is None else self._first
        slowed, unslowed = self._compared_pass_seconds()
        return GenerationStats(
            prompt_tokens=self.prompt_tokens,
            reused_prompt_tokens=self._reused,
            generated_tokens=self._generated,
            passes=self._passes,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            ngram_hits=self._ngram_hits,
            bonus_tokens=self._bonus,
            time_to_first_token=0.0 if self._first is None else self._first - self._started,
            decode_seconds=self._last - first,
            time_per_output_token_p90=percentile(self._token_seconds, 0.9),
            pass_seconds=self._pass_seconds,
            draft_seconds=self._draft_seconds,
            overlapped_draft_seconds=self._overlapped_seconds,
            draft_ahead_hits=self._ahead_hits,
            draft_ahead_misses=self._ahead_misses,
            slowed_pass_seconds=slowed,
            unslowed_pass_seconds=unslowed,
            stall_seconds=stall_seconds,
            bytes_streamed=bytes_streamed,
            peak_memory_bytes=peak_memory_bytes,
            memory_budget_bytes=memory_budget_bytes,
            kv_bytes=kv_bytes,
            kv_used_fraction=kv_used_fraction,
            is_lossless=is_lossless,
            tried_by_depth=self._at_depths(self._tried),
            accepted_by_depth=self._at_depths(self._accepted_at),
        )

    def _at_depths(self, counts: Counter[int]) -> tuple[int, ...]:
        return tuple(counts[depth] for depth in range(1, max(self._tried, default=0) + 1))

    def _compared_pass_seconds(self) -> tuple[float, float]:
        """Seconds of the passes with drafting beside them, and of as many without; of those sizes
        of which there are both."""
        slowed = unslowed = 0.0
        for (n_rows, is_drafting), seconds in self._seconds_by_rows.items():
            alone = self._seconds_by_rows.get((n_rows, False))
            if is_drafting and alone:
                slowed += sum(seconds)
                unslowed += len(seconds) * sum(alone) / len(alone)
        return slowed, unslowed


def percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed; 0 without any."""
    if not values:
        return 0.0
    rank = -int(-fraction * len(values) // 1)  # ceiling: nearest-rank percentile
    return sorted(values)[min(max(rank, 1), len(values)) - 1]


def ratio(numerator: float, denominator: float) -> float:
    """numerator / denominator, 0 where there is nothing to divide by yet."""
    return numerator / denominator if denominator > 0 and numerator > 0 else 0.0
