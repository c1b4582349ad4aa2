"""What the scheduler runs for somebody: a text, or a search that runs passes of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from backends.contract.kv_files import KvFile
from backends.contract.sequence import SequenceRows, TokenSequence
from specdec.decoding.rounds.text_decoder import TextDecoder


class Job:
    """What the scheduler runs for somebody.

    Attributes:
        priority: larger ones are admitted first and set aside last; of equals who came first.
        is_cancelled: nobody wants any more of it; any thread may set it.
        error: what ended it, if anything did.
    """

    priority = 0
    number = -1
    """Of its arrival."""
    is_cancelled = False
    error: BaseException | None = None

    is_complete = False
    """Whether it came to its own end."""

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.error is not None or self.is_complete

    @property
    def rank(self) -> tuple[int, int]:
        """The smallest goes first."""
        return (-self.priority, self.number)


class TextJob(Job, ABC):
    """One text.

    is_fresh: no KV of other texts is used.
    is_streamed: somebody reads its tokens as they come, so that gaps between them are noticed.
    kv_file: its KV, where it was set aside and that is in a file.
    """

    decoder: TextDecoder
    is_fresh = False
    is_streamed = True
    kv_file: KvFile | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it may begin."""
        return True

    @abstractmethod
    def take(self) -> None:
        """Count what the last step brought, and say how many tokens are still wanted."""


class SearchJob(Job, ABC):
    """What runs passes of its own, between those of the texts: beam search.

    text: its KV; None before its first pass, and after one that was cut short.
    """

    text: TokenSequence | None = None
    is_fresh = False

    @property
    @abstractmethod
    def prompt_ids(self) -> Sequence[int]:
        """The tokens that it continues."""

    @abstractmethod
    def begin(self, text: TokenSequence) -> None:
        """Start, with the KV of a beginning of the prompt; once more after a pass that was cut."""

    @property
    @abstractmethod
    def rows(self) -> SequenceRows:
        """Of its next pass."""

    @abstractmethod
    def run(self, most: int | None) -> None:
        """One pass; most: tokens of the prompt in it."""

    @abstractmethod
    def end(self) -> None:
        """No more passes follow; it may have come to its own end."""
