"""The KV of texts that are over, kept for those that begin alike.

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

    def __init__(self, backend: Backend, most: int = 1) -> None:
        self.backend = backend
        self._most = most
        self._in_use: list[SequenceKV] = []
        self._kept: list[SequenceKV] = []  # the oldest first

    def begin(self, token_ids: Sequence[int], *, is_fresh: bool = False) -> SequenceKV:
        """Return a sequence with as much of these tokens' KV as there is, and nothing else.

        The last token's KV is left out, since its logits are wanted.

        is_fresh: nothing of other texts is used.
        What is kept goes, the oldest first, where the backend has no room for one more.
        """
        wanted = [] if is_fresh else list(token_ids[:-1])
        while True:
            try:
                text = self._forked(wanted) or self.backend.new_sequence()
                break
            except BackendError:
                if not self.drop_oldest():
                    raise
        self._in_use.append(text)
        return text

    def _forked(self, token_ids: list[int]) -> SequenceKV | None:
        best, length = None, 0
        for text in (*self._in_use, *self._kept):
            n_common = common_length(list(text.committed_ids), token_ids)
            if n_common > length:
                best, length = text, n_common
        return None if best is None else best.fork(length)

    def n_common(self, token_ids: Sequence[int], apart_from: SequenceKV | None = None) -> int:
        """Of these tokens, the first ones whose KV there is: of all texts but one."""
        wanted = list(token_ids[:-1])
        texts = [text for text in (*self._in_use, *self._kept) if text is not apart_from]
        return max((common_length(list(text.committed_ids), wanted) for text in texts), default=0)

    def make_room(self, text: SequenceKV, n_rows: int) -> None:
        wanted = [SequenceInput(text, [0] * max(1, n_rows))]
        while self._kept and self.backend.n_fitting(wanted) < 1:
            self.drop_oldest()

    def end(self, text: SequenceKV) -> None:
        self._in_use.remove(text)
        text.rollback(text.n_committed)  # live nodes are of no use to others
        self._kept.append(text)
        while len(self._kept) > self._most:
            self.drop_oldest()

    def drop(self, text: SequenceKV) -> None:
        """The text is over, or set aside; nothing of it is kept."""
        self._in_use.remove(text)
        text.close()

    def drop_oldest(self) -> bool:
        """Give back the KV of the text that ended first; False where none is kept."""
        if not self._kept:
            return False
        self._kept.pop(0).close()
        return True

    @property
    def n_in_use(self) -> int:
        """Texts that are not over."""
        return len(self._in_use)

    @property
    def newest(self) -> SequenceKV | None:
        """The text that began or ended last."""
        return (*self._kept, *self._in_use)[-1] if self._kept or self._in_use else None

    @property
    def kept(self) -> tuple[SequenceKV, ...]:
        """Texts that are over, the oldest first."""
        return tuple(self._kept)

    def adopt(self, text: SequenceKV) -> None:
        """Keep a sequence that was filled elsewhere."""
        self._kept.append(text)

    @property
    def n_committed(self) -> int:
        """Tokens of all texts; what they share counts for each of them."""
        return sum(text.n_committed for text in (*self._in_use, *self._kept))
