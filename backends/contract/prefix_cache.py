"""The KV of sequences that are over, kept for those that begin alike.

A text whose prompt begins as another one's takes up that one's KV: of the same prompt once more, of
the next turn of a chat, of several answers to one question. Blocks are shared, nothing is copied
(see `SequenceKV.fork`).
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.contract.backend import Backend, BackendError
from backends.contract.sequence import SequenceInput, SequenceKV, common_length


class PrefixCache:
    """Sequences of a backend: those in use, and the last ones that are over.

    Args:
        most: that are kept after their end; the oldest goes first.
    """

    def __init__(self, backend: Backend, limit: int = 1) -> None:
        self.backend = backend
        self._limit = limit
        self._in_use: list[SequenceKV] = []
        self._cached: list[SequenceKV] = []  # the oldest first

    def begin(self, token_ids: Sequence[int], *, skips_cache: bool = False) -> SequenceKV:
        """Return a sequence with as much of these tokens' KV as there is, and nothing else.

        The last token's KV is left out, since its logits are wanted.

        is_fresh: nothing of other sequences is used.
        What is kept goes, the oldest first, where the backend has no room for one more.
        """
        requested = [] if skips_cache else list(token_ids[:-1])
        while True:
            try:
                text = self._forked(requested) or self.backend.new_sequence()
                break
            except BackendError:
                if not self.drop_oldest():
                    raise
        self._in_use.append(text)
        return text

    def _forked(self, token_ids: list[int]) -> SequenceKV | None:
        best, length = None, 0
        for text in (*self._in_use, *self._cached):
            n_common = common_length(list(text.committed_ids), token_ids)
            if n_common > length:
                best, length = text, n_common
        return None if best is None else best.fork(length)

    def n_common(self, token_ids: Sequence[int], apart_from: SequenceKV | None = None) -> int:
        """Of these tokens, the first ones whose KV there is: of all sequences but one."""
        requested = list(token_ids[:-1])
        sequences = [text for text in (*self._in_use, *self._cached) if text is not apart_from]
        return max(
            (common_length(list(text.committed_ids), requested) for text in sequences), default=0
        )

    def make_capacity(self, text: SequenceKV, num_tokens: int) -> None:
        requested = [SequenceInput(text, [0] * max(1, num_tokens))]
        while self._cached and self.backend.n_fitting(requested) < 1:
            self.drop_oldest()

    def end(self, text: SequenceKV) -> None:
        self._in_use.remove(text)
        text.rollback(text.n_committed)  # live nodes are of no use to others
        self._cached.append(text)
        while len(self._cached) > self._limit:
            self.drop_oldest()

    def drop(self, text: SequenceKV) -> None:
        """The text is over, or set aside; nothing of it is kept."""
        self._in_use.remove(text)
        text.close()

    def drop_oldest(self) -> bool:
        """Give back the KV of the text that ended first; False where none is kept."""
        if not self._cached:
            return False
        self._cached.pop(0).close()
        return True

    @property
    def n_in_use(self) -> int:
        """Texts that are not over."""
        return len(self._in_use)

    @property
    def newest(self) -> SequenceKV | None:
        """The text that began or ended last."""
        return (*self._cached, *self._in_use)[-1] if self._cached or self._in_use else None

    @property
    def cached(self) -> tuple[SequenceKV, ...]:
        """Texts that are over, the oldest first."""
        return tuple(self._cached)

    def adopt(self, text: SequenceKV) -> None:
        """Keep a sequence that was filled elsewhere."""
        self._cached.append(text)

    @property
    def n_committed(self) -> int:
        """Tokens of all sequences; what they share counts for each of them."""
        return sum(text.n_committed for text in (*self._in_use, *self._cached))
