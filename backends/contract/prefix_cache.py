"""PrefixCache: the KV of finished sequences, cached for those that begin with the same tokens.

A sequence reuses the KV of another one with a common prefix: of the same prompt sent again, of the
previous turn of a chat, of the other answers to one question. Blocks are shared, nothing is copied
(see `SequenceKV.fork`).
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.contract.backend import Backend, BackendError
from backends.contract.sequence import SequenceInput, SequenceKV, common_length


class PrefixCache:
    """Sequences of a backend: those in use, and the last ones that have finished.

    Args:
        limit: maximum number of finished sequences that are cached; the oldest is dropped first.
    """

    def __init__(self, backend: Backend, limit: int = 1) -> None:
        self.backend = backend
        self._limit = limit
        self._in_use: list[SequenceKV] = []
        self._cached: list[SequenceKV] = []  # the oldest first

    def allocate(self, token_ids: Sequence[int], *, skips_cache: bool = False) -> SequenceKV:
        """Return a sequence whose KV is the longest cached prefix of these tokens.

        The last token's KV is left out, since its logits are needed. Cached sequences are dropped,
        the oldest first, while the backend has no capacity for one more.

        skips_cache: do not reuse KV of other sequences.
        """
        prefix = [] if skips_cache else list(token_ids[:-1])
        while True:
            try:
                sequence = self._forked(prefix) or self.backend.new_sequence()
                break
            except BackendError:
                if not self.drop_oldest():
                    raise
        self._in_use.append(sequence)
        return sequence

    def _forked(self, token_ids: list[int]) -> SequenceKV | None:
        best, length = None, 0
        for sequence in (*self._in_use, *self._cached):
            n_common = sequence.restorable(common_length(sequence.committed_ids, token_ids))
            if n_common > length:
                best, length = sequence, n_common
        return None if best is None else best.fork(length)

    def n_common(self, token_ids: Sequence[int], apart_from: SequenceKV | None = None) -> int:
        """Return how many of these tokens have KV in a sequence other than `apart_from`."""
        prefix = list(token_ids[:-1])
        remaining = [kv for kv in (*self._in_use, *self._cached) if kv is not apart_from]
        common = (kv.restorable(common_length(kv.committed_ids, prefix)) for kv in remaining)
        return max(common, default=0)

    def ensure_capacity(self, sequence: SequenceKV, num_tokens: int) -> None:
        batch = [SequenceInput(sequence, [0] * max(1, num_tokens))]
        while self._cached and self.backend.n_fitting(batch) < 1:
            self.drop_oldest()

    def release(self, sequence: SequenceKV) -> None:
        self._in_use.remove(sequence)
        sequence.finish()
        self._cached.append(sequence)
        while len(self._cached) > self._limit:
            self.drop_oldest()

    def drop(self, sequence: SequenceKV) -> None:
        """Close a finished or preempted sequence without caching its KV."""
        self._in_use.remove(sequence)
        sequence.close()

    def drop_oldest(self) -> bool:
        """Free the oldest cached KV; return False if none is cached."""
        if not self._cached:
            return False
        self._cached.pop(0).close()
        return True

    @property
    def n_in_use(self) -> int:
        """Number of running sequences."""
        return len(self._in_use)

    @property
    def newest(self) -> SequenceKV | None:
        """The running sequence that began last, or else the cached one that finished last."""
        return (*self._cached, *self._in_use)[-1] if self._cached or self._in_use else None

    @property
    def cached(self) -> tuple[SequenceKV, ...]:
        """Cached sequences that have finished, the oldest first."""
        return tuple(self._cached)

    @property
    def n_cached(self) -> int:
        """Committed tokens of cached sequences; shared ones count for each of them."""
        return sum(sequence.n_committed for sequence in self._cached)

    def adopt(self, sequence: SequenceKV) -> None:
        """Add a sequence that was filled elsewhere to the cache."""
        sequence.finish()
        self._cached.append(sequence)

    @property
    def n_committed(self) -> int:
        """Committed tokens of all sequences; shared ones count for each of them."""
        return sum(sequence.n_committed for sequence in (*self._in_use, *self._cached))
