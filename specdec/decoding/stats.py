"""What one generation did and what it cost. Every figure's convention is stated at its formula.

A *round* is draft, one decode pass of the target, acceptance. The prompt's pass (prefill) yields
the first token and is no decode pass: it counts in the time to first token and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

PREFILL, PASS, DRAFT, ACCEPT = "prefill", "pass", "draft", "accept"
"""Kinds of events in a recording (offload.trace): of the prompt, and a round's three parts. That of
acceptance marks its end."""


class PassTime(NamedTuple):
    """One decode pass of the target."""

    n_rows: int
    seconds: float
    is_drafting_ahead: bool = False  # another thread drafted meanwhile


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
    draft_runs: int = 0  # runs of the draft model that their trees waited for: levels, mostly
    accepted_tokens: int = 0
    ngram_hits: int = 0  # accepted tokens that an n-gram proposed, alone or with the draft model
    bonus_tokens: int = 0  # rounds that ended at a leaf of a non-empty tree
    queue_seconds: float = 0.0  # until the text took part in passes, beside others or alone
    time_to_first_token: float = 0.0  # seconds; prefill and queue included, loading excluded
    decode_seconds: float = 0.0  # from the first token to the last
    time_per_output_token_p90: float = 0.0  # seconds
    pass_seconds: float = 0.0  # inside decode passes
    pass_rows: int = 0  # of these passes, of all texts that shared them
    draft_seconds: float = 0.0  # inside drafters, hidden or not
    overlapped_draft_seconds: float = 0.0  # of draft_seconds, those in which a pass ran as well
    draft_ahead_hits: int = 0  # passes with drafting beside them whose outcome had been drafted
    # ahead: the target's next token was run beside this pass or an earlier one, so the next tree
    # began with its candidates
    draft_ahead_misses: int = 0  # the other passes with drafting beside them
    slowed_pass_seconds: float = 0.0  # see pass_slowdown
    unslowed_pass_seconds: float = 0.0
    stall_seconds: float = 0.0  # passes waiting for storage
    bytes_streamed: int = 0
    bytes_copied_to_device: int = 0  # of weights, from host memory to a GPU
    copy_stall_seconds: float = 0.0  # the GPU computed nothing, because a layer was not there yet
    vram_peak_bytes: int = 0  # most that torch's allocator reserved, of the whole process so far
    vram_budget_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_budget_bytes: int = 0
    kv_bytes: int = 0  # allocated for KV caches
    kv_used_fraction: float = 0.0  # of kv_bytes, at the end
    held_bytes: int = 0  # layers that were to stream and were in unused memory, at the end
    model_flops: int = 0  # of the target for the tokens of decode_seconds; see utilization
    peak_flops_per_second: float = 0.0  # of this machine, measured; 0: not known
    is_lossless: bool = True  # False: likely draft tokens were accepted, too (accept_threshold)
    is_exact: bool = False  # True: the tokens are plain decoding's, to the bit
    tried_by_depth: tuple[int, ...] = ()  # rounds whose walk came to have a guess at depth 1, 2, ..
    accepted_by_depth: tuple[int, ...] = ()  # rounds where one of these guesses was right
    pass_times: tuple[PassTime, ...] = ()  # of every decode pass, in order; not in `to_dict`

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
    def rows_per_pass(self) -> float:
        """Rows of a decode pass, of all texts that shared it, prompts that entered included."""
        return ratio(self.pass_rows, len(self.pass_times))

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
    def model_flops_utilization(self) -> float:
        """Share of the machine's arithmetic that the generated tokens needed (PaLM, appendix B).

        model_flops / (decode_seconds * peak_flops_per_second); rejected tokens do not count. 0
        where the peak is not known.
        """
        return ratio(self.model_flops, self.decode_seconds * self.peak_flops_per_second)

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
    "model_flops_utilization",
    "pass_slowdown",
)
"""The properties that `to_dict` reports beside all fields."""
_FIELDS = tuple(field.name for field in fields(GenerationStats) if field.name != "pass_times")

# How the fields of several generations make those of all of them; the rates follow from these.
LARGEST = (
    "time_per_output_token_p90",  # an upper bound of the p90 of all tokens
    "peak_memory_bytes",
    "memory_budget_bytes",
    "vram_peak_bytes",
    "vram_budget_bytes",
    "kv_bytes",
    "held_bytes",
    "peak_flops_per_second",
)
AVERAGED = ("queue_seconds", "time_to_first_token", "kv_used_fraction")
TRUE_FOR_ALL = ("is_lossless", "is_exact")
BY_DEPTH = ("tried_by_depth", "accepted_by_depth")
"""Summed too, depth by depth."""
_NOT_SUMMED = LARGEST + AVERAGED + TRUE_FOR_ALL + BY_DEPTH
SUMMED = tuple(name for name in _FIELDS if name not in _NOT_SUMMED)


def percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least `fraction` of the values do not exceed; 0 without any."""
    if not values:
        return 0.0
    rank = -int(-fraction * len(values) // 1)  # ceiling: nearest-rank percentile
    return sorted(values)[min(max(rank, 1), len(values)) - 1]


def ratio(numerator: float, denominator: float) -> float:
    """numerator / denominator, 0 where there is nothing to divide by yet."""
    return numerator / denominator if denominator > 0 and numerator > 0 else 0.0
