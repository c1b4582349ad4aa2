"""KVCacheManager: allocate, share, swap and free the KV of sequences.

Scheduled by priority, then first come, first served. Where the KV cache has no capacity for all,
the sequence that came last is preempted: its KV is swapped out to a file and swapped in when it
goes on. It is recomputed where that is quicker, or where no file can be written (vLLM's
recomputation, Kwon et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from backends.contract.backend import Backend, BackendError, KvFileError
from backends.contract.kv_files import KvFiles
from backends.contract.prefix_cache import PrefixCache
from backends.contract.prefix_files import FILE_BYTES_PER_SECOND, FILE_SECONDS
from backends.contract.sequence import SequenceInput, SequenceKV, common_length
from specdec.engine.sequences.sequence import Sequence
from specdec.metrics.recorder import Totals
from specdec.policy.cost_model import CostModel
from specdec.policy.kv_price import KvPrice
from specdec.policy.waiting_notes import WaitingNotes

_MIN_UNSHARED_FRACTION = 0.5
"""Minimum fraction of a sequence's tokens whose KV no other sequence shares, for swapping to pay:
shared KV takes no memory of its own, KV from a file does."""
_MIN_SHARED_PREFIX = 16
"""Minimum common prefix, in tokens, for a prompt to wait for another one that is computing it."""
_MIN_OBSERVED_TOKENS = 128
"""Minimum size of a pass over prompts to learn from: smaller ones are learnt from in decoding."""
_TOKENS_TO_GROW = 64
"""A block of the KV cache, free for each sequence before another one is scheduled."""
_EXPECTED_TOKENS = 256
"""New tokens that a sequence is expected to have, unless fewer are allowed."""


class KVCacheManager:
    """Manager of the sequences' KV in the target: allocation, prefix reuse, preemption.

    Args:
        cache: the target's prefix cache.
        files: store of swapped-out KV.
        cost: seconds of passes.
        totals: counters of preempted and swapped sequences.
        max_num_seqs: maximum number of sequences that have KV at a time.
        max_cached_tokens: maximum tokens of finished sequences whose KV is cached, except for the
            last one's.
        price: what a further sequence's KV costs every pass.
        notes: lines for users about sequences that wait.

    Attributes:
        running: sequences that have KV.
    """

    def __init__(
        self,
        target: Backend,
        cache: PrefixCache,
        files: KvFiles,
        cost: CostModel,
        totals: Totals,
        max_num_seqs: int,
        max_cached_tokens: int,
        price: KvPrice,
        notes: WaitingNotes,
    ) -> None:
        self.cache, self.files = cache, files
        self._price, self._notes = price, notes
        self._target, self.cost, self._totals = target, cost, totals
        self._max_num_seqs, self._max_cached_tokens = max_num_seqs, max_cached_tokens
        self._has_computed = False
        cache.seconds = self._recompute_seconds
        self.running: list[Sequence] = []

    @property
    def max_scored_tokens(self) -> int | None:
        """See Backend.max_scored_tokens."""
        return self._target.max_scored_tokens

    # --- allocate ------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its cached KV and capacity for the rest; False if it waits."""
        if len(self.running) >= self._max_num_seqs or self._waits_for_another(sequence):
            return False
        if sequence.has_live_nodes and any(item.has_live_nodes for item in self.running):
            return False
        if not self._pays(sequence):
            return False
        while not (
            self._swap_in(sequence)
            if self._pays_to_swap(sequence)
            else self._match_prefix(sequence)
        ):
            if not self.cache.evict(self._max_evicted_seconds(sequence)):
                self._note_capacity(sequence)
                return False
        self.discard_file(sequence)
        self.running.append(sequence)
        return True

    def _max_evicted_seconds(self, sequence: Sequence) -> float | None:
        """Return the value of cached KV that may be evicted for a waiting sequence. While others
        run, it waits rather than take KV that is dearer than its own and than it has waited."""
        if not self.running:
            return None
        own_seconds = self._recompute_seconds(len(sequence.ids_to_compute))
        return max(own_seconds, sequence.request.recorder.waited_seconds)

    def _pays(self, sequence: Sequence) -> bool:
        """Return whether a waiting sequence brings more than its KV and its tokens cost."""
        num_running = len(self.running)
        if not num_running or not self._price.token_bytes:
            return True
        num_tokens = sequence.num_context_tokens + min(sequence.num_left, _EXPECTED_TOKENS)
        num_own = max(0, num_tokens - self._num_shared(sequence))
        if self._price.pays(self.cost, num_running, num_own):
            return True
        self._notes.note_price(num_own, num_running)
        return False

    def _note_capacity(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.ids_to_compute)
        lengths = [item.num_context_tokens for item in (*self.running, sequence)]
        blocks = [-(-length // _TOKENS_TO_GROW) + 1 for length in lengths]  # the last one to grow
        self._notes.note_capacity(num_tokens, sum(blocks) * _TOKENS_TO_GROW, len(self.running))

    def _match_prefix(self, sequence: Sequence) -> bool:
        """Attach the cached KV of the longest prefix, if there is capacity for the rest."""
        ids = sequence.ids_to_compute
        kv = self._new_kv(ids, sequence.cache_prompt)
        if kv is None:
            return False
        if not self._has_capacity(len(ids) - kv.n_committed, kv):
            self.cache.drop(kv)
            return False
        sequence.attach(self._load_longer(sequence, kv))
        return True

    def _load_longer(self, sequence: Sequence, kv: SequenceKV) -> SequenceKV:
        """Return KV of a longer prefix from storage, where reading it is quicker than computing."""
        if not sequence.cache_prompt:
            return kv
        loaded = self.cache.load_longer(kv, sequence.ids_to_compute)
        if loaded is not kv:
            self._totals.add(loaded_prefixes=1, loaded_prefix_tokens=loaded.n_committed)
        return loaded

    def _swap_in(self, sequence: Sequence) -> bool:
        """Attach the KV of the sequence's file, if there is capacity."""
        ids, file = sequence.ids_to_compute, sequence.kv_file
        assert file is not None, "a sequence without a file is not swapped in"
        kv = self._new_kv(ids, cache_prompt=False)
        if kv is None:
            return False
        has_capacity = self._has_capacity(len(ids), kv)
        if has_capacity:  # also true for the only sequence: then cached KV is dropped for it
            self.cache.ensure_capacity(kv, len(ids))
        num_growth_bytes = self._target.kv_growth_bytes(self.cache.n_committed + len(ids))
        if has_capacity and file.load(kv, num_growth_bytes):
            self._totals.add(swapped_in=1, swapped_in_tokens=kv.n_committed)
            sequence.attach(kv, is_swapped_in=True)
            return True
        self.cache.drop(kv)
        if not has_capacity:
            return False
        self.discard_file(sequence)  # it cannot be read
        return self._match_prefix(sequence)

    def _new_kv(self, token_ids: SequenceOf[int], cache_prompt: bool) -> SequenceKV | None:
        """Return KV for a sequence; None if the backend has no capacity beside the running ones."""
        try:
            return self.cache.allocate(token_ids, skips_cache=not cache_prompt)
        except BackendError:
            if self.running:
                return None
            raise

    def _has_capacity(self, num_tokens: int, kv: SequenceKV) -> bool:
        """Return whether `num_tokens` more tokens fit beside the other sequences' growth.

        The only sequence is always scheduled: there will never be more capacity.
        """
        if not self.running:
            return True
        batch = [_tokens(kv, num_tokens + _TOKENS_TO_GROW)]
        for other in self.running:
            batch.append(_tokens(other.active_kv, other.num_uncomputed + _TOKENS_TO_GROW))
        return self._target.n_fitting(batch) == len(batch)

    def _waits_for_another(self, sequence: Sequence) -> bool:
        """Return whether a running sequence is computing a prefix of this one, or the
        log-probabilities of its prompt, which come before the request's first token."""
        ids = sequence.ids_to_compute[:-1]
        for other in self.running:
            if other.request is sequence.request and other.scores_prompt:
                return True
            if not sequence.cache_prompt or other.is_decoding:
                continue
            num_common = common_length(other.ids_to_compute, ids)
            if num_common - other.active_kv.n_committed >= _MIN_SHARED_PREFIX:
                return True
        return False

    # --- capacity of a step --------------------------------------------------------------------

    def preempt_for_capacity(
        self, sequences: SequenceOf[Sequence], max_num_nodes: int
    ) -> list[Sequence]:
        """Make capacity for the next tokens of each sequence; return the sequences preempted.

        max_num_nodes: maximum nodes that one pass scores.
        """
        remaining = list(sequences)
        preempted: list[Sequence] = []
        num_nodes = max_num_nodes // max(1, len(remaining))
        for item in remaining:
            self.cache.ensure_capacity(item.active_kv, max(num_nodes, item.num_uncomputed))
        while True:
            batch = [item.min_input() for item in remaining]
            if self._target.n_fitting(batch) == len(batch):
                return preempted
            if self.cache.evict():
                continue
            if len(remaining) < 2:
                return preempted  # there will never be more: the pass raises what is full
            self.preempt(remaining[-1])  # the lowest rank
            preempted.append(remaining.pop())

    def limit_to_free_nodes(self, decode: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Return the first sequences whose step fits the free nodes: beams may use most of them."""
        num_left = self._target.num_free_nodes
        for index, item in enumerate(decode):
            num_left -= item.min_step_tokens
            if num_left < 0 and index:
                return decode[:index]
        return decode

    # --- free ----------------------------------------------------------------------------------

    def free(self, sequence: Sequence) -> None:
        """Leave the KV of a finished sequence to the prefix cache, unless its file failed."""
        self.running.remove(sequence)
        if isinstance(sequence.request.error, KvFileError):
            self.cache.drop(sequence.active_kv)
        else:
            self.cache.release(sequence.active_kv)
        while self.cache.n_cached > self._max_cached_tokens and len(self.cache.cached) > 1:
            self.cache.evict()
        sequence.detach()

    def drop_cached(self) -> bool:
        """Drop the KV of finished sequences, for storage that is full; return whether there was
        any."""
        has_cached = bool(self.cache.cached)
        self.cache.clear()
        return has_cached

    def preempt(self, sequence: Sequence) -> None:
        """Free the KV of a sequence; swap it out where that is quicker than recomputing it."""
        self._totals.add(preempted=1)
        self.running.remove(sequence)
        kv = sequence.active_kv
        if not sequence.has_live_nodes and self._target.can_save_prefix:
            num_shared = self._num_shared(sequence, kv)
            num_bytes = sum(tensor.n_bytes for tensor in kv.prefix_tensors())
            if self._pays_off(kv.n_committed, num_shared, num_bytes):
                sequence.kv_file = self.files.write(kv)
        self.cache.drop(kv)
        sequence.detach()

    @staticmethod
    def discard_file(sequence: Sequence) -> None:
        file, sequence.kv_file = sequence.kv_file, None
        if file is not None:
            file.close()

    def _pays_to_swap(self, sequence: Sequence) -> bool:
        file = sequence.kv_file
        if file is None:
            return False
        return self._pays_off(len(file.token_ids), self._num_shared(sequence), file.n_bytes)

    def _recompute_seconds(self, num_tokens: int) -> float:
        return self.cost.extra_seconds(num_tokens)

    def observe_prefill(self, num_tokens: int, seconds: float, stall_seconds: float = 0.0) -> None:
        """Correct the cost of passes by one over prompts alone: the price of their KV. Not by the
        first one, which also waits for weights that are still being read."""
        if self._has_computed and num_tokens >= _MIN_OBSERVED_TOKENS:
            self.cost.observe(num_tokens, seconds, stall_seconds)
        self._has_computed = True

    def save_prefixes(self) -> None:
        """Write the KV of newly finished sequences to storage where that pays."""
        num_files = self.cache.save_new()
        if num_files:
            self._totals.add(saved_prefixes=num_files)

    def _num_shared(self, sequence: Sequence, own: SequenceKV | None = None) -> int:
        """Return the number of its first tokens that others have KV of."""
        if not sequence.cache_prompt:
            return 0
        return self.cache.n_common(sequence.ids_to_compute, own)

    def _pays_off(self, num_tokens: int, num_shared: int, num_bytes: int) -> bool:
        """Return whether writing and reading a file is quicker than recomputing its tokens."""
        num_own = num_tokens - num_shared
        if num_own < _MIN_UNSHARED_FRACTION * num_tokens:
            return False
        return (
            self._recompute_seconds(num_own) > FILE_SECONDS + 2 * num_bytes / FILE_BYTES_PER_SECOND
        )


def _tokens(kv: SequenceKV, num_tokens: int) -> SequenceInput:
    """Return a placeholder input of `num_tokens` tokens, to query the capacity it takes."""
    return SequenceInput(kv, [0] * num_tokens)
