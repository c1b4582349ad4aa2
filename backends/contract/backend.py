"""Backend, the interface of one loaded model with the KV cache of its sequences.

Draft and target models implement the same one.

A backend knows tokens, logits and its KV cache. It knows nothing of speculation: it scores
tentative *nodes*, and the caller then commits those that became part of the sequence.

Logits are numpy arrays, so that a backend without torch can implement the interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import Self

from backends.contract.sequence import (
    SequenceInput,
    SequenceKV,
    SequenceOutput,
)
from offload.errors import SpecdecError

if TYPE_CHECKING:  # types only: the command line imports this module
    from offload.experts.readers import ExpertStats
    from offload.ring.cursor import StreamStats

PREFIX = -1
"""Parent of a node that follows the last committed token directly."""

LAST_HIDDEN_STATE = -1
"""Hidden state after the final norm: the input of the output head."""

SCORED_ROWS = 16
"""Rows of logits that a backend without `max_scored_tokens` computes at once to score them."""

_MAX_CHARACTERS = 400
_PLENTY_NODES = 2**20


class BackendError(SpecdecError):
    """An operation that the backend's state does not allow."""


class ContextFull(BackendError):
    """The requested tokens do not fit in the context."""

    def __init__(self, requested: int, n_committed: int, max_context: int) -> None:
        super().__init__(
            f"{requested} more tokens after {n_committed} do not fit in the context of "
            f"{max_context} tokens: shorten the prompt, ask for fewer tokens or raise --ctx-size"
        )


class KvFileError(BackendError):
    """KV of some sequences could not be written to its file, or read from it.

    blocks: cold blocks that could not be moved.
    """

    def __init__(self, message: str, blocks: Collection[int] = ()) -> None:
        super().__init__(message)
        self.blocks = frozenset(blocks)
        self.stores: Collection[object] = ()
        """Stores of the sequences that are concerned; empty if unknown."""


class UnsupportedModel(SpecdecError):
    """The checkpoint is of a kind that specdec cannot run."""


class TransferStats(NamedTuple):
    """Traffic of a backend's weights since it was loaded."""

    bytes_streamed: int = 0
    """Bytes read from storage."""
    stall_seconds: float = 0.0
    """Time that passes waited for storage: for a layer to be in memory, before a copy to a GPU."""
    bytes_copied: int = 0
    """Bytes copied from host memory to a GPU."""
    copy_stall_seconds: float = 0.0
    """Time that the GPU was idle because a layer was not there yet: storage and copies."""
    experts_asked: int = 0
    """Experts that passes requested in layers that do not keep all of them in memory."""
    experts_found: int = 0
    """Expert cache hits: requested experts that were in memory."""
    kv_bytes_read: int = 0
    """Bytes of keys and values that passes read from the KV file."""
    kv_bytes_written: int = 0
    read_seconds: float = 0.0
    """Time in which at least one read of a layer was running."""

    @property
    def wait_seconds(self) -> float:
        """Time that passes did not compute because a layer was not there. The host of a GPU also
        waits for slots whose layers are being computed."""
        return self.copy_stall_seconds if self.bytes_copied else self.stall_seconds

    def plus(self, other: TransferStats) -> TransferStats:
        """Return the sum of the traffic of two backends."""
        return TransferStats(
            self.bytes_streamed + other.bytes_streamed,
            self.stall_seconds + other.stall_seconds,
            self.bytes_copied + other.bytes_copied,
            self.copy_stall_seconds + other.copy_stall_seconds,
            self.experts_asked + other.experts_asked,
            self.experts_found + other.experts_found,
            self.kv_bytes_read + other.kv_bytes_read,
            self.kv_bytes_written + other.kv_bytes_written,
            self.read_seconds + other.read_seconds,
        )

    @classmethod
    def of(cls, layers: StreamStats, experts: ExpertStats) -> TransferStats:
        """Return the sum of the traffic of layers and of experts that are read one by one."""
        return cls(
            layers.bytes_read + experts.bytes_read,
            layers.stall_seconds + experts.stall_seconds,
            experts_asked=experts.n_asked,
            experts_found=experts.n_hits,
            read_seconds=layers.read_seconds,
        )


class MaskedBlock(NamedTuple):
    """A block that a draft head fills in one pass: the pending token, then masked positions.

    Its tokens are the nodes of one SequenceInput, in a chain; they may see one another in both
    directions, and the logits of each are for its own position.
    """

    size: int
    """Positions, the pending token included."""
    mask_token_id: int
    top_k: int = 0
    """Candidates of a position whose transitions are returned in place of hidden states: float32
    [n, top_k + top_k * top_k], the tokens, then the score of each of them after each token of the
    position before (after the pending token, in the first of them). To be asked for, with logits,
    at all masked positions. 0: positions are independent."""


class KvUsage(NamedTuple):
    """Token positions of a KV cache in use."""

    n_used: int
    """Positions that sequences use; one that several share counts once."""
    n_shared: int
    """Positions that would be needed in addition if nothing were shared."""


def one_line(error: BaseException) -> str:
    """Return the message of a library's error in one line, for use in ours; long ones are cut."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 4] + " ..."


class Backend(ABC):
    """One model and the KV cache of its sequences."""

    vocab_size: int
    """Columns of the logits; may exceed the tokenizer's length by padding rows."""
    max_context: int
    """Maximum number of tokens of a sequence: committed ones plus the depth of its live nodes."""
    takes_hidden_states: bool = False
    """Whether it is a draft head, whose inputs have the target's hidden states."""
    attends_to_target: bool = False
    """Whether it is a draft head without keys of its own, whose inputs have a `context`."""
    masked_block: MaskedBlock | None = None
    """Block of a draft head that fills masked positions; its hidden states are those of tokens that
    are appended to the prefix, and its nodes have none. None: any other model."""
    max_nodes: int | None = None
    """Maximum number of live nodes of all sequences together; None: limited by memory alone."""
    max_scored_tokens: int | None = None
    """Maximum tokens of a pass whose logits are scored (`SequenceInput.scored_at`) or returned.
    None: any number, a few at a time."""

    @abstractmethod
    def new_sequence(self) -> SequenceKV:
        """Return the KV of a new, empty sequence.

        Raises BackendError if there is no capacity for one more.
        """

    @abstractmethod
    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        """Run one forward pass over the new tokens of each sequence; each is in the batch once.

        A failure drops the live nodes of all of them and leaves their committed prefixes.
        Raises ContextFull if a sequence gets longer than `max_context`, and BackendError if all
        together exceed the backend's capacity.
        """

    def collect_hidden_states(self, layers: Sequence[int]) -> None:
        """Let passes return, for tokens in `SequenceInput.hidden_states_at`, the outputs of these
        layers side by side: [n, len(layers) * hidden].

        layers: decoder layers by index, or LAST_HIDDEN_STATE.
        """
        raise BackendError("this backend returns no hidden states")

    @property
    def num_free_nodes(self) -> int:
        """Live nodes that may be added to those of all sequences now."""
        return _PLENTY_NODES

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        """Return how many inputs, from the first on, fit in one pass by memory and live nodes."""
        return len(batch)

    @property
    def limits_sequences(self) -> bool:
        """Whether a sequence takes more than its tokens: one of so many recurrent states, or of
        llama.cpp's sequences."""
        return False

    @property
    def can_save_prefix(self) -> bool:
        """Whether a saved prefix can be rolled back like any other once it is loaded.

        llama.cpp saves only the last window of layers with a sliding window.
        """
        return True

    @property
    def transfer_stats(self) -> TransferStats:
        """Storage traffic so far; zero for a model in memory."""
        return TransferStats()

    @property
    @abstractmethod
    def kv_bytes(self) -> int:
        """Bytes that the KV cache takes now."""

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent states that sequences keep now, beside the KV cache; any thread may
        read it."""
        return 0

    @property
    @abstractmethod
    def n_kv_allocated(self) -> int:
        """Token positions that fit in `kv_bytes`."""

    @property
    @abstractmethod
    def kv_usage(self) -> KvUsage:
        """Positions that sequences use; any thread may read it."""

    @property
    def cold_kv_bytes(self) -> int:
        """Bytes of KV in a file, which passes over their sequences read."""
        return 0

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        """Return the maximum growth of KV cache and states in the next pass over nodes, in bytes.

        n_tokens: tokens of all sequences together before those nodes.
        num_new_seqs: sequences among them that have not begun yet.
        """
        return 0

    @property
    def unused_kv_bytes(self) -> int:
        """Bytes of KV memory that no sequence uses and `release_unused_kv` would free."""
        return 0

    def release_unused_kv(self) -> None:  # noqa: B027 (optional)
        """Free KV memory that no sequence uses. Call it between passes only."""

    @property
    def unread_bytes(self) -> int:
        """Bytes of resident weights that have not been read yet; the first pass waits for them."""
        return 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of streamed layers that are pinned for now (opportunistic layer cache)."""
        return 0

    def set_pinned_bytes(self, n_bytes: int) -> None:  # noqa: B027 (optional)
        """Pin streamed layers in memory after their next use, up to `n_bytes`; release what exceeds
        that at once. Call it between passes only."""

    def request_cancel(self) -> None:  # noqa: B027 (optional)
        """End a running pass soon with an error; any thread may call this."""

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
