"""Scheduler: choose the sequences of each step; they join and leave between forward passes.

    waiting ──scheduled──> prefill ──prompt computed──> decode ──> finished
       ^                      │                           │
       └────── preempted, where the KV cache is full ─────┘

Continuous batching as in Orca (Yu et al. 2022): all ready sequences share the next pass. Long
prompts are computed in chunks beside the others' decoding (Sarathi, Agrawal et al. 2023), so that
streaming readers wait little longer than for a pass. Where the KV cache has no capacity for all,
the sequence that came last is preempted and goes on later (see KVCacheManager).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from backends.contract.sequence import SequenceInput
from specdec.engine.kv_cache_manager import KVCacheManager
from specdec.engine.sequences.request import Request
from specdec.engine.sequences.sequence import Sequence
from specdec.metrics.recorder import Totals
from specdec.policy.cost_model import MAX_MEASURED_TOKENS, CostModel

MAX_PASS_RATIO = 1.5
"""Maximum duration of a pass with prefill chunks, as a multiple of a decode-only pass."""
MIN_PASS_LIMIT_SECONDS = 0.25
"""Passes up to this duration are always allowed: no reader notices the gap, and a model in memory
would otherwise need hundreds of passes for a long prompt."""


MAX_PREFILL_SECONDS = 10.0
"""Maximum duration of a pass over prompts alone: a prompt that is cancelled, or whose pass fails,
keeps the passes before ..."""
MIN_PREFILL_RATIO = 4
"""... but each reads the model, so it may last this multiple of a pass of one token, or of as many
as use all experts of a mixture: the arithmetic of so many tokens hides the read."""


class PrefillChunk(NamedTuple):
    """The next tokens of a prompt, or of a sequence that was preempted."""

    sequence: Sequence
    input: SequenceInput

    @property
    def num_tokens(self) -> int:
        return len(self.input.token_ids)

    @property
    def num_logits(self) -> int:
        """Tokens whose logits are returned or scored."""
        return len({*self.input.logit_positions, *self.input.scored_at})


@dataclass(frozen=True)
class Batch:
    """Prefill chunks and decoding sequences that one step computes.

    max_num_tokens: tokens of the forward pass, draft tokens included; None: the policy decides.
    """

    decode: SequenceOf[Sequence] = ()
    prefill: SequenceOf[PrefillChunk] = ()
    max_num_tokens: int | None = None
    has_scheduled_new: bool = False
    """Whether a sequence was given KV, which may have been swapped in."""

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.decode, *(chunk.sequence for chunk in self.prefill)]

    @property
    def requests(self) -> list[Request]:
        """The sequences' requests; one may occur several times."""
        return [sequence.request for sequence in self.sequences]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)


class Scheduler:
    """Scheduler of each step's sequences; runs in the engine's thread.

    Args:
        kv: manager of the sequences' KV.
        cost: seconds of passes.
        totals: counters of the engine.
        max_num_seqs: maximum sequences of one pass.
        max_num_nodes: maximum nodes that one pass scores.
        max_prefill_tokens: maximum prompt tokens of one pass.
        kv_seconds: returns the seconds in which a pass reads KV from a file.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        cost: CostModel,
        totals: Totals,
        *,
        max_num_seqs: int,
        max_num_nodes: int,
        max_prefill_tokens: int,
        kv_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.kv, self.totals = kv, totals
        self.cost = cost
        self._max_num_seqs, self._max_prefill_tokens = max_num_seqs, max_prefill_tokens
        self._max_num_nodes, self._kv_seconds = max_num_nodes, kv_seconds
        self._prefill_tokens_per_second = 0.0
        self.waiting: list[Sequence] = []
        self._arrivals = count()

    def add(self, sequences: SequenceOf[Sequence]) -> None:
        """Add sequences to the waiting queue."""
        for sequence in sequences:
            sequence.arrival = next(self._arrivals)
            self.waiting.append(sequence)

    def preempt_all(self) -> None:
        """Preempt all sequences, before the models are closed; cached KV is dropped."""
        for sequence in list(self.running):
            self.kv.preempt(sequence)
            self.waiting.append(sequence)
        self.kv.cache.clear()

    def take_over(self, previous: Scheduler) -> None:
        """Schedule the sequences of another scheduler, all of which wait."""
        self.waiting, self._arrivals = previous.waiting, previous._arrivals

    @property
    def running(self) -> SequenceOf[Sequence]:
        """Sequences that have KV."""
        return self.kv.running

    def free_finished(self) -> None:
        """Free the KV of finished sequences, and drop those that still wait."""
        for sequence in [seq for seq in self.running if seq.is_finished]:
            self.kv.free(sequence)
        for sequence in [seq for seq in self.waiting if seq.is_finished]:
            self.waiting.remove(sequence)
            self.kv.discard_file(sequence)

    def schedule(self) -> Batch:
        """Return the batch of the next step, preempting sequences where capacity is short."""
        has_scheduled_new = self._allocate_waiting()
        running = sorted(self.running, key=_rank)[: self._max_num_seqs]
        self.waiting += self.kv.preempt_for_capacity(running, self._max_num_nodes)
        running = [sequence for sequence in running if sequence.kv is not None]
        decode = self.kv.limit_to_free_nodes([seq for seq in running if seq.is_decoding])
        prefill = [seq for seq in running if not seq.is_decoding]
        max_num_tokens = self._max_num_tokens(decode) if prefill and decode else None
        num_left = min(self._max_prefill_tokens, self._max_prompt_tokens())
        if max_num_tokens is not None:
            num_left = min(num_left, max_num_tokens - _num_tokens(decode))
        elif not decode:
            num_left = _tokens_of_equal_passes(prefill, num_left)
        num_logits = self._num_free_logits(decode, prefill)
        chunks = self._chunks(prefill, num_left, num_logits)
        return Batch(decode, chunks, max_num_tokens, has_scheduled_new)

    def _allocate_waiting(self) -> bool:
        """Allocate KV for waiting sequences in order of rank; return whether any got it."""
        num_running = len(self.running)
        for sequence in sorted(self.waiting, key=_rank):
            if not sequence.can_start:
                continue
            if not self.kv.allocate(sequence):
                break
            self.waiting.remove(sequence)
        return len(self.running) > num_running

    @staticmethod
    def _chunks(
        sequences: SequenceOf[Sequence], num_left: int, num_logits: int | None
    ) -> list[PrefillChunk]:
        """Return prefill chunks of `num_left` tokens at most, first come first served.

        num_logits: tokens among them that may have logits, besides one of each sequence; None: any.
        """
        chunks = []
        for sequence in sequences:
            if num_left < 1:
                break
            max_logits = None
            if num_logits is not None and sequence.scores_prompt:
                max_logits = 1 + num_logits
                if max_logits < 1:
                    continue  # beams have them all
            chunk = PrefillChunk(sequence, sequence.prefill_chunk(num_left, max_logits))
            num_left -= chunk.num_tokens
            if max_logits is not None and num_logits is not None:
                num_logits -= max(0, chunk.num_logits - 1)
            chunks.append(chunk)
        return chunks

    def _num_free_logits(
        self, decode: SequenceOf[Sequence], prefill: SequenceOf[Sequence]
    ) -> int | None:
        """Return how many rows of logits a pass may have besides one of each prompt and those of
        decoding sequences; None: any number."""
        max_num_logits = self.kv.max_scored_tokens
        if max_num_logits is None:
            return None
        return max_num_logits - _num_tokens(decode) - len(prefill)

    def _max_prompt_tokens(self) -> int:
        """Return the maximum tokens of a pass over prompts alone.

        The cost model may know the sizes that were not tried lately from passes in longer contexts
        only. So a pass may also have as many tokens as take that time at the last one's speed.
        """
        read_seconds = self.cost.seconds(self.cost.num_tokens_of_all_experts) + self._kv_seconds()
        seconds = max(MAX_PREFILL_SECONDS, MIN_PREFILL_RATIO * read_seconds)
        at_last_speed = int(seconds * self._prefill_tokens_per_second)
        return max(1, self.cost.max_num_tokens(seconds), at_last_speed)

    def observe_prefill(self, num_tokens: int, seconds: float, stall_seconds: float = 0.0) -> None:
        """Learn from a pass over prompts alone."""
        self._prefill_tokens_per_second = num_tokens / seconds
        self.kv.observe_prefill(num_tokens, seconds, stall_seconds)

    def _max_num_tokens(self, decode: SequenceOf[Sequence]) -> int:
        """Return the maximum tokens of a pass with prefill chunks beside these sequences.

        Prompt tokens take precedence over draft tokens. At least one prompt token is scheduled, so
        that no request starves.
        """
        cost, num_tokens = self.cost, _num_tokens(decode)
        if not any(sequence.request.streams_output for sequence in decode):
            return max(num_tokens + 1, min(self._max_prefill_tokens, MAX_MEASURED_TOKENS))
        seconds = max(MAX_PASS_RATIO * cost.seconds(num_tokens), MIN_PASS_LIMIT_SECONDS)
        return max(num_tokens + 1, cost.max_num_tokens(seconds))


def _tokens_of_equal_passes(prefill: SequenceOf[Sequence], max_tokens: int) -> int:
    """Return the tokens of each pass if these prompts take as few passes as possible, all equally
    long: the arithmetic of a short last one would not hide its read of the model."""
    num_uncomputed = sum(sequence.num_uncomputed for sequence in prefill)
    num_passes = max(1, -(-num_uncomputed // max_tokens))
    return -(-num_uncomputed // num_passes)


def _num_tokens(decode: SequenceOf[Sequence]) -> int:
    return sum(sequence.min_step_tokens for sequence in decode)


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
