"""The contract of a backend: one loaded model with its KV cache, draft and target alike.

A backend knows tokens, logits and its KV cache. It knows nothing of speculation: it scores
tentative *nodes*, and is told afterwards which of them became part of the text.

Logits are numpy arrays, so that a backend without torch fits the same contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np
from typing_extensions import Self

from offload.errors import SpecdecError
from offload.formats.mapped import TensorShape

SavedTensors = Mapping[str, tuple[TensorShape, memoryview]]
"""Tensors by name, each with its bytes, which may be written to."""

PREFIX = -1
"""Parent of a node that follows the last committed token directly."""
_MOST_CHARACTERS = 400


class BackendError(SpecdecError):
    """A backend was asked for something that its state does not allow."""


class ContextFull(BackendError):
    """The tokens asked for do not fit in the context."""

    def __init__(self, wanted: int, n_committed: int, max_context: int) -> None:
        super().__init__(
            f"{wanted} more tokens after {n_committed} do not fit in the context of "
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


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two sequences of tokens."""
    n_tokens = min(len(first), len(second))
    if first[:n_tokens] == second[:n_tokens]:  # usual, and quick
        return n_tokens
    pairs = zip(first, second, strict=False)
    return next(i for i, (one, other) in enumerate(pairs) if one != other)


def one_line(error: BaseException) -> str:
    """What a library raised, as part of one line of ours: all lines of the message joined, cut
    where they become a lecture."""
    text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 4] + " ..."


class Text(ABC):
    """The KV of one text: a committed prefix of `n_committed` tokens plus any number of live
    tentative nodes, which form a forest below the prefix.

    Node ids are consecutive integers that are never used twice; the next call of `extend` gives
    `next_node_id` to its first node, so that a batch can name parents inside itself.

    An error or a cancel in any method leaves the committed prefix as it was before the call
    and drops every live node.
    """

    @property
    @abstractmethod
    def committed_ids(self) -> Sequence[int]:
        """The tokens whose KV is the committed prefix; exact at all times, not to be changed."""

    @property
    def n_committed(self) -> int:
        """Length of the committed prefix."""
        return len(self.committed_ids)

    @property
    @abstractmethod
    def next_node_id(self) -> int:
        """The id that the first node of the next `extend` will get."""

    @abstractmethod
    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """Append `token_ids` to the committed prefix; return the last one's logits [vocab].

        Costs one read of the model however long the prompt is. Live nodes are dropped.
        Raises ContextFull when the tokens do not fit.
        """

    @abstractmethod
    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        """Score n tentative nodes in one pass.

        parents [n]: PREFIX, a live node's id, or the id of an earlier node of this call.
        rows: positions within this call whose logits are wanted (all when None).
        Returns, when the pass is over, the n new ids and float32 logits [len(rows) or n, vocab].
        """

    @abstractmethod
    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Make the KV of `path` (a chain of live nodes from the prefix down) part of the prefix.

        The subtrees rooted at the nodes in `keep`, children of the path's end, stay live; every
        other node is dropped. Nothing is recomputed.
        """

    @abstractmethod
    def prune(self, nodes: Collection[int]) -> None:
        """Drop these live nodes and all nodes below them."""

    @abstractmethod
    def rollback(self, length: int) -> None:
        """Cut the committed prefix to `length` tokens (absolute) and drop all live nodes."""

    def prefill_from(self, token_ids: Sequence[int]) -> tuple[int, np.ndarray]:
        """Make `token_ids` the committed prefix, keeping the KV of the beginning they share.

        The last token is computed in any case, for its logits.
        Returns the number of tokens whose KV was kept, and the last one's logits [vocab].
        """
        wanted = list(token_ids)
        n_kept = common_length(list(self.committed_ids), wanted[:-1])
        if n_kept < self.n_committed:
            self.rollback(n_kept)
        return n_kept, self.prefill(wanted[n_kept:])


class Backend(Text):
    """One model and the KV cache of a text."""

    vocab_size: int
    """Columns of the logits; may exceed the tokenizer's length by padding rows."""
    max_context: int
    """Most tokens (committed and live depth) that a sequence may have."""
    max_nodes: int | None = None
    """Most live nodes at a time; None where memory alone is the limit."""

    @property
    def node_room(self) -> int:
        """Most live nodes that a tree on the present prefix may have."""
        return self.max_context if self.max_nodes is None else self.max_nodes

    @property
    def can_save_prefix(self) -> bool:
        """Whether a saved prefix could be cut back like any other once it is restored.

        llama.cpp saves only the last window of layers with a sliding window.
        """
        return True

    @abstractmethod
    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        """The tensors that hold the KV of the committed prefix. Live nodes are dropped."""

    @abstractmethod
    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        """Write the tensors of `prefix_tensors` into the buffers of their names.

        Takes no memory beside the buffers.
        """

    @abstractmethod
    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        """Make `token_ids` the committed prefix, with the KV that `save_prefix` wrote for it.

        Raises BackendError where the tensors are not those of such a prefix of this model; the
        cache is empty then.
        """

    def sibling(self, *, max_context: int, max_nodes: int, max_rows: int) -> Backend:
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

    def kv_growth_bytes(self, n_tokens: int) -> int:
        """What the KV cache may take beside what it takes now, by the end of a pass over nodes
        that follow a text of so many tokens, should it lack some of them."""
        return 0

    @property
    def unread_bytes(self) -> int:
        """Of weights that are to stay in memory, what has not been read yet; the first pass waits
        for them."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Memory of layers that would stream and are held for now."""
        return 0

    def hold(self, n_bytes: int) -> None:
        """Let layers that stream stay in memory after their next use, as many as so many bytes
        hold; what is held beyond that is given back at once. Between passes only."""

    def request_cancel(self) -> None:
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
