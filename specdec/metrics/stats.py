"""Statistics of one generation, and of all generations of a loaded model.

Each rate is defined at its formula.

A *step* is draft, one decode pass of the target, acceptance. The prompt's pass (prefill) yields
the first token and is no decode pass: it counts in the time to first token and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any, NamedTuple

from specdec.metrics.renamed import RenamedFields, with_old_names

PREFILL, PASS, DRAFT, ACCEPT = "prefill", "pass", "draft", "accept"
"""Kinds of events in a recording (offload.trace): prefill, and the three parts of a step, the last
of which is its acceptance."""


class MeasuredPass(NamedTuple):
    """One decode pass of the target."""

    num_tokens: int
    seconds: float
    is_drafting_ahead: bool = False  # another thread drafted meanwhile
    has_pinned: bool = False  # layers that were to stream were in memory


@dataclass(frozen=True)
class GenerationStats(RenamedFields):
    """Raw counts of one generation; rates are properties, so that they cannot disagree.

    Bytes and seconds of streaming and of memory are 0 where they were not measured.
    """

    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0  # KV found in the prefix cache
    generated_tokens: int = 0  # including the first one, which prefill yields
    passes: int = 0  # decode passes of the target
    drafted_tokens: int = 0  # nodes verified, without the roots
    draft_runs: int = 0  # runs of the draft model before a pass: levels of trees, mostly
    accepted_tokens: int = 0
    ngram_hits: int = 0  # accepted tokens proposed by an n-gram, also where the draft did as well
    bonus_tokens: int = 0  # steps that ended at a leaf of a non-empty tree
    queue_seconds: float = 0.0  # until it was scheduled for the first time
    time_to_first_token: float = 0.0  # seconds; prefill and queue included, loading excluded
    decode_seconds: float = 0.0  # from the first token to the last
    time_per_output_token_p90: float = 0.0  # seconds
    pass_seconds: float = 0.0  # inside decode passes
    batch_tokens: int = 0  # of these passes, of all sequences in the batch
    draft_seconds: float = 0.0  # inside drafters, beside a pass or not
    overlapped_draft_seconds: float = 0.0  # of draft_seconds, those beside a pass
    draft_ahead_hits: int = 0  # passes with drafting beside them whose outcome had been drafted
    # ahead: the target's next token was run beside this pass or an earlier one, so the next tree
    # began with its candidates
    draft_ahead_misses: int = 0  # the other passes with drafting beside them
    slowed_pass_seconds: float = 0.0  # see pass_slowdown
    unslowed_pass_seconds: float = 0.0
    stall_seconds: float = 0.0  # passes waiting for storage
    bytes_streamed: int = 0
    kv_bytes_read: int = 0  # of KV that does not fit in memory, from its file
    kv_bytes_written: int = 0
    bytes_copied_to_device: int = 0  # of weights, from host memory to a GPU
    copy_stall_seconds: float = 0.0  # the GPU computed nothing, because a layer was not there yet
    experts_asked: int = 0  # experts that passes used, of a mixture
    experts_found: int = 0  # of these, cache hits
    vram_peak_bytes: int = 0  # reserved by torch's allocator, of the process so far
    vram_budget_bytes: int = 0
    peak_memory_bytes: int = 0
    memory_budget_bytes: int = 0
    kv_bytes: int = 0  # allocated for KV caches
    cache_type_k: str = ""  # number format of the target's keys
    cache_type_v: str = ""  # and of its values
    kv_used_fraction: float = 0.0  # of kv_bytes, by all sequences, at the end
    kv_shared_bytes: int = 0  # saved by sharing between sequences, at the end
    state_bytes: int = 0  # of recurrent layers' states, of all sequences, at the end
    pinned_bytes: int = 0  # streamed layers pinned in unused memory, at the end
    model_flops: int = 0  # of the target, for the tokens of decode_seconds
    peak_flops_per_second: float = 0.0  # of this machine, measured; 0: not known
    is_lossless: bool = True  # False: likely draft tokens were accepted, too (accept_threshold)
    is_exact: bool = False  # True: the tokens are plain decoding's, to the bit
    tried_by_depth: tuple[int, ...] = ()  # steps that verified a guess at depth 1, 2, ..
    accepted_by_depth: tuple[int, ...] = ()  # steps that accepted one
    pass_times: tuple[MeasuredPass, ...] = ()  # of every decode pass, in order; not in `to_dict`

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
    def expert_hit_rate(self) -> float:
        """Share of the experts asked for that were in memory; 0 where none are read as needed."""
        return ratio(self.experts_found, self.experts_asked)

    @property
    def batch_tokens_per_pass(self) -> float:
        """Tokens of a decode pass, of all sequences in the batch, prefill chunks included."""
        return ratio(self.batch_tokens, len(self.pass_times))

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
        """Seconds of a pass with drafting beside it / without, for the same number of tokens.

        slowed_pass_seconds are those of all passes with drafting beside them whose number of tokens
        was measured without as well; unslowed_pass_seconds are what as many passes take at the
        mean without. 1: drafting ahead costs the pass nothing. 0: never measured both ways.
        """
        return ratio(self.slowed_pass_seconds, self.unslowed_pass_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers for JSON: seconds, bytes, tokens and fractions."""
        values = {name: getattr(self, name) for name in (*RATES, *_FIELDS)}
        return with_old_names(values | {name: list(values[name]) for name in BY_DEPTH})


@dataclass(frozen=True)
class EngineStats(RenamedFields):
    """Sums over all generations of a loaded model since it was loaded.

    Running generations count with what they have done so far. A pass counts once, however many
    sequences are in its batch.
    """

    requests: int = 0  # finished, cancelled or failed
    prompt_tokens: int = 0  # of prompts whose prefill is complete
    reused_prompt_tokens: int = 0  # of these, found in the prefix cache
    first_tokens: int = 0  # prompts whose prefill is complete
    generated_tokens: int = 0
    passes: int = 0  # of the target, prompts' included
    pass_seconds: float = 0.0
    batch_tokens: int = 0
    prefill_tokens: int = 0  # of batch_tokens: of prompts, and of sequences that come back
    sequence_passes: int = 0  # decode passes, once for each sequence in the batch
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ngram_hits: int = 0
    queue_seconds: float = 0.0  # see GenerationStats; of all requests that have begun
    first_token_seconds: float = 0.0  # see GenerationStats.time_to_first_token
    preempted: int = 0  # preemptions: a sequence gave its KV up
    swapped_in: int = 0  # preempted sequences whose KV was read back from a file
    swapped_in_tokens: int = 0  # of these
    saved_prefixes: int = 0  # files written to the prompt cache folder
    loaded_prefixes: int = 0  # prompts whose KV was read from there
    loaded_prefix_tokens: int = 0  # of these, in reused_prompt_tokens
    recomputed_tokens: int = 0  # of preempted sequences, computed again
    bytes_streamed: int = 0
    kv_bytes_read: int = 0  # of KV that does not fit in memory, from its file
    kv_bytes_written: int = 0
    bytes_copied_to_device: int = 0
    stall_seconds: float = 0.0
    sequences_running: int = 0  # now, and so are all below
    sequences_waiting: int = 0
    kv_bytes: int = 0  # allocated
    kv_used_bytes: int = 0  # in use, the prefix cache included
    kv_shared_bytes: int = 0  # saved by sharing between sequences
    state_bytes: int = 0  # of recurrent layers' states, the prefix cache included
    pinned_bytes: int = 0  # streamed layers pinned in unused memory
    memory_budget_bytes: int = 0
    accepted_by_depth: tuple[int, ...] = ()  # steps that accepted a guess at depth 1, 2, ..

    @property
    def tokens_per_pass(self) -> float:
        """Generated tokens / passes, of all sequences: tokens per read of the model."""
        return ratio(self.generated_tokens, self.passes)

    @property
    def batch_tokens_per_pass(self) -> float:
        return ratio(self.batch_tokens, self.passes)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decode pass and sequence: 1 + accepted / sequence_passes."""
        return 1.0 + ratio(self.accepted_tokens, self.sequence_passes)

    @property
    def acceptance_rate(self) -> float:
        return ratio(self.accepted_tokens, self.drafted_tokens)

    @property
    def mean_queue_seconds(self) -> float:
        """Mean of prompts whose prefill is complete."""
        return ratio(self.queue_seconds, self.first_tokens)

    @property
    def mean_time_to_first_token(self) -> float:
        return ratio(self.first_token_seconds, self.first_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates for JSON."""
        counted = {field.name: getattr(self, field.name) for field in fields(EngineStats)}
        rates = {name: getattr(self, name) for name in _ENGINE_RATES}
        by_depth = {"accepted_by_depth": list(self.accepted_by_depth)}
        return with_old_names({**rates, **counted, **by_depth})


_ENGINE_RATES = (
    "tokens_per_pass",
    "batch_tokens_per_pass",
    "mean_acceptance_length",
    "acceptance_rate",
    "mean_queue_seconds",
    "mean_time_to_first_token",
)


def sum_of(stats: Iterable[EngineStats]) -> EngineStats:
    """Return the sum over several machines."""
    stats = list(stats)
    by_depth = zip_longest(*(stat.accepted_by_depth for stat in stats), fillvalue=0)
    names = {field.name for field in fields(EngineStats)} - {"accepted_by_depth"}
    return EngineStats(
        **{name: sum(getattr(stat, name) for stat in stats) for name in names},
        accepted_by_depth=tuple(map(sum, by_depth)),
    )


RATES = (
    "tokens_per_second",
    "time_per_output_token",
    "mean_acceptance_length",
    "expert_hit_rate",
    "acceptance_rate",
    "flops_rejected_fraction",
    "model_flops_utilization",
    "pass_slowdown",
)
"""Properties that `to_dict` reports beside all fields."""
_FIELDS = tuple(field.name for field in fields(GenerationStats) if field.name != "pass_times")

# How the fields of several generations make those of all of them; the rates follow from these.
LARGEST = (
    "time_per_output_token_p90",  # an upper bound of the p90 of all tokens
    "peak_memory_bytes",
    "memory_budget_bytes",
    "vram_peak_bytes",
    "vram_budget_bytes",
    "kv_bytes",
    "kv_shared_bytes",
    "state_bytes",
    "pinned_bytes",
    "peak_flops_per_second",
)
AVERAGED = ("queue_seconds", "time_to_first_token", "kv_used_fraction")
TRUE_FOR_ALL = ("is_lossless", "is_exact")
SAME_FOR_ALL = ("cache_type_k", "cache_type_v")
"""Fields that generations of one run have in common; empty where they differ."""
BY_DEPTH = ("tried_by_depth", "accepted_by_depth")
"""Fields summed depth by depth."""
_NOT_SUMMED = LARGEST + AVERAGED + TRUE_FOR_ALL + SAME_FOR_ALL + BY_DEPTH
SUMMED = tuple(name for name in _FIELDS if name not in _NOT_SUMMED)


def percentile(values: list[float], fraction: float) -> float:
    """Return the smallest value that `fraction` of the values do not exceed; 0 for no values."""
    if not values:
        return 0.0
    rank = -int(-fraction * len(values) // 1)  # ceiling: nearest-rank percentile
    return sorted(values)[min(max(rank, 1), len(values)) - 1]


def ratio(numerator: float, denominator: float) -> float:
    """Return numerator / denominator, or 0 while there is nothing to divide by."""
    return numerator / denominator if denominator > 0 and numerator > 0 else 0.0
