"""KVCacheManager: which sequences have KV, and what becomes of it.

First come first served, by priorities. Where the KV cache has no capacity for all, the sequence
that came last is preempted: its KV is swapped out to a file and swapped in when it goes on. It is
computed anew where that is quicker, or where no file can be written (vLLM's recomputation, Kwon et
al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from backends.contract.backend import Backend, BackendError
from backends.contract.kv_files import KvFiles
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput, SequenceKV, common_length
from specdec.engine.sequence import Sequence
from specdec.metrics.recorder import Totals
from specdec.policy.cost_model import CostModel

FILE_SECONDS = 0.01
"""Of writing a file and reading it again, however short it is, and ..."""
FILE_BYTES_PER_SECOND = 200e6
"""... of each way: a slow disk's. On a faster one a file pays for fewer tokens than it is used for,
and those are few: 15 of a 3B in bf16, whose rows take 60 ms."""
_OWN_SHARE = 0.5
"""Of a sequence's tokens, that no other one holds, for a file to be worth it: what others hold is
shared with them, and what a file brings takes memory of its own."""
_PAYS_TO_WAIT = 16
"""Tokens that a prompt begins with, for it to wait for another one that is computing them."""
_TOKENS_TO_GROW = 64
"""A block of the KV cache, free for each sequence before another one is scheduled."""


class KVCacheManager:
    """Allocates, frees, preempts.

    Args:
        cache: the target's KV by prefix.
        files: where preempted sequences are swapped out to.
        cost: how long passes take.
        max_num_seqs: that have KV at a time.

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
    ) -> None:
        self.cache, self.files = cache, files
        self._target, self.cost, self._totals = target, cost, totals
        self._max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []

    # --- allocate ------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence) -> bool:
        """Give a waiting sequence KV, as much of it as is cached; False where it has to wait."""
        if len(self.running) >= self._max_num_seqs or self._waits_for_another(sequence):
            return False
        if sequence.keeps_nodes and any(item.keeps_nodes for item in self.running):
            return False
        while not (
            self._swap_in(sequence)
            if self._pays_to_swap(sequence)
            else self._match_prefix(sequence)
        ):
            if not self.cache.drop_oldest():
                return False
        self.discard_file(sequence)
        self.running.append(sequence)
        return True

    def _match_prefix(self, sequence: Sequence) -> bool:
        """Take up the KV that is cached, if there is capacity for the rest."""
        ids = sequence.ids_to_compute
        kv = self._new_kv(ids, sequence.request.cache_prompt)
        if kv is None:
            return False
        if self._has_capacity(len(ids) - kv.n_committed, kv):
            sequence.attach(kv)
            return True
        self.cache.drop(kv)
        return False

    def _swap_in(self, sequence: Sequence) -> bool:
        """Take up the KV that the sequence's file has, if there is capacity."""
        ids, file = sequence.ids_to_compute, sequence.kv_file
        assert file is not None, "a sequence without a file is not swapped in"
        kv = self._new_kv(ids, cache_prompt=False)
        if kv is None:
            return False
        has_capacity = self._has_capacity(len(ids), kv)
        if has_capacity:  # it may be alone: what is cached goes then
            self.cache.make_capacity(kv, len(ids))
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
        """Return None where the backend has no capacity for one more beside those that run."""
        try:
            return self.cache.begin(token_ids, skips_cache=not cache_prompt)
        except BackendError:
            if self.running:
                return None
            raise

    def _has_capacity(self, num_tokens: int, kv: SequenceKV) -> bool:
        """Return whether it fits with the others' growth.

        Alone it is let in: more capacity there will never be.
        """
        if not self.running:
            return True
        batch = [_tokens(kv, num_tokens + _TOKENS_TO_GROW)]
        for other in self.running:
            batch.append(_tokens(other.computing, other.num_uncomputed + _TOKENS_TO_GROW))
        return self._target.n_fitting(batch) == len(batch)

    def _waits_for_another(self, sequence: Sequence) -> bool:
        """Return whether another one is computing the prefix of this one, too."""
        ids = sequence.ids_to_compute[:-1]
        for other in self.running:
            if not sequence.request.cache_prompt or other.is_decoding:
                continue
            num_common = common_length(other.token_ids, ids)
            if num_common - other.computing.n_committed >= _PAYS_TO_WAIT:
                return True
        return False

    # --- capacity of a step --------------------------------------------------------------------

    def make_capacity(self, sequences: SequenceOf[Sequence], max_num_nodes: int) -> list[Sequence]:
        """Let each of them take part with at least its next tokens; return those preempted for it.

        max_num_nodes: nodes that one pass scores.
        """
        remaining = list(sequences)
        preempted: list[Sequence] = []
        num_nodes = max_num_nodes // max(1, len(remaining))
        for item in remaining:
            self.cache.make_capacity(item.computing, max(num_nodes, item.num_uncomputed))
        while True:
            batch = [item.min_rows() for item in remaining]
            if self._target.n_fitting(batch) == len(batch):
                return preempted
            if self.cache.drop_oldest():
                continue
            if len(remaining) < 2:
                return preempted  # more capacity there will never be: the pass says what is full
            self.preempt(remaining[-1])  # the last one in rank
            preempted.append(remaining.pop())

    def within_nodes(self, decode: SequenceOf[Sequence]) -> SequenceOf[Sequence]:
        """Return those, from the first on, that live nodes are left for: beams may hold most."""
        num_left = self._target.num_free_nodes
        for index, item in enumerate(decode):
            num_left -= item.min_step_tokens
            if num_left < 0 and index:
                return decode[:index]
        return decode

    # --- free ----------------------------------------------------------------------------------

    def free(self, sequence: Sequence) -> None:
        """Leave the KV of a sequence that is over to the prefix cache."""
        self.running.remove(sequence)
        self.cache.end(sequence.computing)
        sequence.detach()

    def preempt(self, sequence: Sequence) -> None:
        """Take the KV away, swapped out where that is quicker than computing it anew."""
        self._totals.add(preempted=1)
        self.running.remove(sequence)
        kv = sequence.computing
        num_bytes = kv.n_committed * self._target.kv_bytes // max(1, self._target.n_kv_allocated)
        num_shared = self._num_shared(sequence, kv)
        if not sequence.keeps_nodes and self._pays_off(kv.n_committed, num_shared, num_bytes):
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

    def _num_shared(self, sequence: Sequence, own: SequenceKV | None = None) -> int:
        """Return how many of its first tokens others have KV of."""
        if not sequence.request.cache_prompt:
            return 0
        return self.cache.n_common(sequence.ids_to_compute, own)

    def _pays_off(self, num_tokens: int, num_shared: int, num_bytes: int) -> bool:
        """Return whether a file is quicker than the tokens of passes that it saves."""
        num_own = num_tokens - num_shared
        if num_own < _OWN_SHARE * num_tokens:
            return False
        seconds = self.cost.seconds(1 + num_own) - self.cost.seconds(1)
        return seconds > FILE_SECONDS + 2 * num_bytes / FILE_BYTES_PER_SECOND


def _tokens(kv: SequenceKV, num_tokens: int) -> SequenceInput:
    """Return so many tokens, to ask for the capacity that they take."""
    return SequenceInput(kv, [0] * num_tokens)
