"""The contract of a backend: one loaded model with the KV cache of its sequences.

Draft and target fulfil the same one.

A backend knows tokens, logits and its KV cache. It knows nothing of speculation: it scores
tentative *nodes*, and is told afterwards which of them became part of the text.

Logits are numpy arrays, so that a backend without torch fits the same contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from backends.contract.sequence import (
    SequenceInput,
    SequenceKV,
    SequenceOutput,
)
from offload.errors import SpecdecError

if TYPE_CHECKING:  # only names of types, for the command line imports this
    from offload.experts.readers import ExpertStats
    from offload.ring.cursor import StreamStats

PREFIX = -1
"""Parent of a node that follows the last committed token directly."""

_MAX_CHARACTERS = 400
_PLENTY_NODES = 2**20


class BackendError(SpecdecError):
    """A backend was asked for something that its state does not allow."""


class ContextFull(BackendError):
    """The tokens asked for do not fit in the context."""

    def __init__(self, requested: int, n_committed: int, max_context: int) -> None:
        super().__init__(
            f"{requested} more tokens after {n_committed} do not fit in the context of "
            f"{max_context} tokens: shorten the prompt, ask for fewer tokens or raise --ctx-size"
        )


class UnsupportedModel(SpecdecError):
    """The checkpoint is of a kind that specdec does not run."""


class StreamUse(NamedTuple):
    """Traffic of a backend's weights since it was loaded."""

    bytes_streamed: int = 0
    """Read from storage."""
    stall_seconds: float = 0.0
    """Passes waited for a layer: for it to be in memory or, on a GPU, to be on its way there."""
    bytes_copied: int = 0
    """Copied from host memory to a GPU."""
    copy_stall_seconds: float = 0.0
    """The GPU had nothing to compute, because a layer was not there yet: storage and copies."""
    experts_asked: int = 0
    """Experts that passes asked a mixture's layers for, where not all of them stay in memory."""
    experts_found: int = 0
    """Of these, those that were in memory."""

    @classmethod
    def of(cls, layers: StreamStats, experts: ExpertStats) -> StreamUse:
        """Layers from storage, and experts of theirs that are read one by one."""
        return cls(
            layers.bytes_read + experts.bytes_read,
            layers.stall_seconds + experts.stall_seconds,
            experts_asked=experts.n_asked,
            experts_found=experts.n_hits,
        )


class KvUse(NamedTuple):
    """Token positions of a KV cache."""

    n_used: int
    """That sequences hold; one that several hold counts once."""
    n_shared: int
    """That would be needed beside these if nothing were shared."""


def one_line(error: BaseException) -> str:
    """What a library raised, as part of one line of ours: all lines of the message joined, cut
    where they become a lecture."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 4] + " ..."


class Backend(ABC):
    """One model and the KV cache of its sequences."""

    vocab_size: int
    """Columns of the logits; may exceed the tokenizer's length by padding rows."""
    max_context: int
    """Most tokens (committed and live depth) that a sequence may have."""
    max_nodes: int | None = None
    """Most live nodes at a time, of all sequences; None where memory alone is the limit."""

    @abstractmethod
    def new_sequence(self) -> SequenceKV:
        """Return the KV of a further sequence, empty as yet.

        Raises BackendError where there is no capacity for one more.
        """

    @abstractmethod
    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        """Run one forward pass over what each sequence adds, each of which is in the batch once.

        A failure drops the live nodes of all of them and leaves their committed prefixes.
        Raises ContextFull where a sequence gets longer than `max_context`, and BackendError where
        all together take more than the backend has capacity for.
        """

    @property
    def num_free_nodes(self) -> int:
        """Live nodes that there may be beside those of all sequences now."""
        return _PLENTY_NODES

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        """How many of these, from the first on, there is room for in one pass, as far as memory and
        live nodes go."""
        return len(batch)

    @property
    def can_save_prefix(self) -> bool:
        """Whether a saved prefix could be cut back like any other once it is restored.

        llama.cpp saves only the last window of layers with a sliding window.
        """
        return True

    def sibling(self, *, max_context: int, max_nodes: int, max_num_tokens: int) -> Backend:
        """A backend with a KV cache of its own over this one's weights, which must be in memory.

        max_rows: most nodes of one call of `extend`.
        Two threads may use the two. Close the sibling first.
        """
        raise BackendError("this backend cannot share its weights")

    @property
    def stream_use(self) -> StreamUse:
        """Storage traffic so far; zero for a model that is held in memory."""
        return StreamUse()

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes that the KV cache holds now."""

    @property
    @abstractmethod
    def n_kv_allocated(self) -> int:
        """Token positions that `kv_bytes` has room for."""

    @property
    @abstractmethod
    def kv_use(self) -> KvUse:
        """What sequences hold of these positions; any thread may ask."""

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        """What the KV cache may take beside what it takes now, by the end of a pass over nodes
        that follow sequences of so many tokens together, should it lack some of them.

        n_new_texts: of these, that have no sequence yet.
        """
        return 0

    @property
    def unread_bytes(self) -> int:
        """Of weights that are to stay in memory, what has not been read yet; the first pass waits
        for them."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """Memory of layers that would stream and are held for now."""
        return 0

    def pin_layers(self, n_bytes: int) -> None:  # noqa: B027 (optional)
        """Let layers that stream stay in memory after their next use, as many as so many bytes
        hold; what is held beyond that is given back at once. Between passes only."""

    def request_cancel(self) -> None:  # noqa: B027 (optional)
        """End a running pass soon with an error; any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Release threads, files and memory. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
