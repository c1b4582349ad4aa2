"""PrefixCache: the KV of finished sequences, cached for those that begin with the same tokens.

A sequence reuses the KV of another one with a common prefix: of the same prompt sent again, of the
previous turn of a chat, of the other answers to one question. Blocks are shared, nothing is copied
(see `SequenceKV.fork`).

Sequences are evicted by GreedyDual (Young 1994, Algorithmica 11): a sequence is valued at the
seconds that its own tokens would take to compute again, plus the value of the last eviction at the
time of its last use. So short requests evict each other, and a long prefix that nobody uses ages.
GreedyDual-Size (Cao and Irani 1997; with frequencies: Cherkasova 1998) divides by the size. But the
seconds of a prefix grow with its tokens, so that the quotient is nearly the same for all, and the
rule becomes LRU (tests/backends/contract/test_eviction.py compares the three).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext

from backends.contract.backend import Backend, BackendError
from backends.contract.prefix_files import PrefixFiles
from backends.contract.sequence import SequenceInput, SequenceKV, common_length


class CachedSequence:
    """A finished sequence.

    Attributes:
        base_value: value of the last eviction when it was used last.
        is_new: whether it was not considered for a file yet.
    """

    def __init__(self, kv: SequenceKV, base_value: float) -> None:
        self.kv, self.base_value, self.is_new = kv, base_value, True


class PrefixCache:
    """Sequences of a backend: those in use, and finished ones as far as there is capacity.

    Args:
        max_num_cached: maximum number of finished sequences; None: limited by tokens alone.

    Attributes:
        seconds: seconds to compute a number of tokens again; by default all are equal.
        files: prefixes on storage; None: there are none.
    """

    def __init__(self, backend: Backend, max_num_cached: int | None = None) -> None:
        self.backend = backend
        self.seconds: Callable[[int], float] = float
        self.files: PrefixFiles | None = None
        self._max_num_cached = max_num_cached
        self._in_use: list[SequenceKV] = []
        self._cached: list[CachedSequence] = []  # in the order of their last use
        self._last_value = 0.0
        """Value of the last sequence that was evicted."""

    # --- sequences in use ------------------------------------------------------------------

    def allocate(self, token_ids: Sequence[int], *, skips_cache: bool = False) -> SequenceKV:
        """Return a sequence whose KV is the longest cached prefix of these tokens.

        The last token's KV is left out, since its logits are needed. Cached sequences are evicted
        while the backend has no capacity for one more.

        skips_cache: do not reuse KV of other sequences.
        """
        prefix = [] if skips_cache else list(token_ids[:-1])
        while True:
            try:
                sequence = self._forked(prefix) or self.backend.new_sequence()
                break
            except BackendError:
                if not self.evict():
                    raise
        self._in_use.append(sequence)
        return sequence

    def _forked(self, token_ids: list[int]) -> SequenceKV | None:
        best, length, source = None, 0, None
        candidates = [(kv, None) for kv in self._in_use]
        for kv, item in (*candidates, *((item.kv, item) for item in self._cached)):
            n_common = kv.restorable(common_length(kv.committed_ids, token_ids))
            if n_common > length:
                best, length, source = kv, n_common, item
        if best is None:
            return None
        fork = best.fork(length)
        if source is not None:
            source.base_value = self._last_value
            self._cached.remove(source)
            self._cached.append(source)
        return fork

    def load_longer(self, kv: SequenceKV, token_ids: Sequence[int]) -> SequenceKV:
        """Return KV of a longer prefix of these tokens from storage, in place of `kv`, if there is
        one and reading it is quicker than computing; else return `kv`."""
        stored = None if self.files is None else self.files.longest(list(token_ids[:-1]))
        if self.files is None or stored is None:
            return kv
        n_more = stored.length - kv.n_committed
        if n_more < 1 or self.files.read_seconds(stored.n_bytes) >= self.seconds(n_more):
            return kv
        try:
            loaded = self.backend.new_sequence()
        except BackendError:
            return kv
        self.ensure_capacity(loaded, stored.num_tokens)
        batch = [SequenceInput(loaded, [0] * stored.num_tokens)]
        n_growth = self.backend.kv_growth_bytes(self.n_committed + stored.num_tokens)
        if self.backend.n_fitting(batch) < 1 or not self.files.load(stored, loaded, n_growth):
            loaded.close()
            return kv
        loaded.rollback(stored.length)
        self.drop(kv)
        self._in_use.append(loaded)
        return loaded

    def ensure_capacity(self, sequence: SequenceKV, num_tokens: int) -> None:
        batch = [SequenceInput(sequence, [0] * max(1, num_tokens))]
        while self._cached and self.backend.n_fitting(batch) < 1:
            self.evict()

    def release(self, sequence: SequenceKV) -> None:
        """Cache the KV of a finished sequence."""
        self._in_use.remove(sequence)
        sequence.finish()
        self._cached.append(CachedSequence(sequence, self._last_value))
        limit = self._max_num_cached
        while limit is not None and len(self._cached) > limit:
            self.evict()

    def drop(self, sequence: SequenceKV) -> None:
        """Close a finished or preempted sequence without caching its KV."""
        self._in_use.remove(sequence)
        sequence.close()

    # --- cached sequences ------------------------------------------------------------------

    def evict(self, max_seconds: float | None = None) -> bool:
        """Free the cached KV of the lowest value, the one that was used first among equal ones;
        return False if none is cached.

        max_seconds: do not free KV that is worth more than this now; None: any.
        """
        if not self._cached:
            return False
        num_shared = self._num_shared_tokens()
        values = [
            item.base_value + self.seconds(item.kv.n_committed - num_shared[id(item.kv)])
            for item in self._cached
        ]
        index = min(range(len(values)), key=values.__getitem__)
        if max_seconds is not None and values[index] - self._last_value > max_seconds:
            return False
        self._last_value = max(self._last_value, values[index])
        self._cached.pop(index).kv.close()
        return True

    def clear(self) -> None:
        """Free all cached KV."""
        while self._cached:
            self._cached.pop().kv.close()

    def _num_shared_tokens(self) -> dict[int, int]:
        """Return for each sequence, by id, the tokens whose KV another one has as well: all, if
        another one continues it."""
        ordered = sorted((*self._in_use, *self.cached), key=lambda kv: list(kv.committed_ids))
        result = dict.fromkeys(map(id, ordered), 0)
        # In the order of their tokens, neighbours have the longest common prefixes.
        for first, second in zip(ordered, ordered[1:], strict=False):
            n_common = common_length(first.committed_ids, second.committed_ids)
            continues = n_common == first.n_committed
            n_first = n_common if continues else second.restorable(n_common)
            result[id(first)] = max(result[id(first)], n_first)
            result[id(second)] = max(result[id(second)], first.restorable(n_common))
        return result

    def save_new(self) -> int:
        """Write the KV of newly finished sequences to storage where that pays; return how many
        files were written."""
        num_files = 0
        for item in self._cached:
            if item.is_new and self.files is not None:
                num_files += self._save(item.kv, self.files)
            item.is_new = False
        return num_files

    def _save(self, kv: SequenceKV, files: PrefixFiles) -> int:
        if not self.backend.can_save_prefix:
            return 0
        lengths, num_files = kv.snapshot_lengths, 0
        for length in lengths:
            n_more = length - files.n_common(kv.committed_ids[:length])
            if n_more < 1 or self.seconds(n_more) <= files.read_seconds(0):
                continue  # usual for short requests: no need to look at the KV
            try:
                with nullcontext(kv) if len(lengths) == 1 else closing(kv.fork(length)) as part:
                    num_files += files.write(part, self.seconds(n_more))
            except BackendError:
                continue  # no capacity for a fork
        return num_files

    # --- queries ---------------------------------------------------------------------------

    def n_common(self, token_ids: Sequence[int], apart_from: SequenceKV | None = None) -> int:
        """Return how many of these tokens have KV in a sequence other than `apart_from`."""
        prefix = list(token_ids[:-1])
        remaining = [kv for kv in (*self._in_use, *self.cached) if kv is not apart_from]
        common = (kv.restorable(common_length(kv.committed_ids, prefix)) for kv in remaining)
        return max(common, default=0)

    @property
    def n_in_use(self) -> int:
        """Number of running sequences."""
        return len(self._in_use)

    @property
    def cached(self) -> tuple[SequenceKV, ...]:
        """Finished sequences that are cached, the one that was used first first."""
        return tuple(item.kv for item in self._cached)

    @property
    def n_cached(self) -> int:
        """Committed tokens of cached sequences; those of common prefixes count once."""
        ordered = sorted(list(kv.committed_ids) for kv in self.cached)
        return sum(map(len, ordered)) - sum(map(common_length, ordered, ordered[1:]))

    @property
    def n_committed(self) -> int:
        """Committed tokens of all sequences; shared ones count for each of them."""
        return sum(sequence.n_committed for sequence in (*self._in_use, *self.cached))
