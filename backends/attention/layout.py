"""Layout of one forward pass: a prefix and a tree of nodes, and which keys each row sees.

Windows are by position, since the rows of a tree are not in the order of their positions. Nearly
all of a mask would be zeros, because every node sees the prefix. So a layout also has `spans`: runs
of keys with a mask only if some rows see them and others do not (used by
backends/attention/segments.py). NumPy only, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """Keys start..end of the cache, and which rows see them.

    allowed [rows, end - start]: None if every row sees all of them.
    is_causal: row i sees the first i + 1 of them; `allowed` is None then.
    """

    start: int
    end: int
    allowed: np.ndarray | None = None
    is_causal: bool = False


@dataclass(frozen=True)
class PassLayout:
    """Positions and visibility in one forward pass: cached rows and new rows.

    prefix : committed rows, at positions 0 .. prefix-1
    node_positions [nodes] : positions of the rows after the prefix, including new ones
    visible [new, nodes] : which of those rows each new row sees
    """

    prefix: int
    node_positions: np.ndarray
    visible: np.ndarray

    @property
    def n_new(self) -> int:
        return len(self.visible)

    @property
    def first_new(self) -> int:
        """Index of the first new row among the nodes."""
        return len(self.node_positions) - self.n_new

    @property
    def new_positions(self) -> np.ndarray:
        return self.node_positions[self.first_new :]

    def n_keys(self, end: int) -> int:
        """Number of keys once the first `end` new rows are cached."""
        return self.prefix + self.first_new + end

    def key_positions(self, end: int) -> np.ndarray:
        """Positions of the keys that exist once `end` new rows are cached, [keys]."""
        nodes = self.node_positions[: self.first_new + end]
        return np.concatenate([np.arange(self.prefix, dtype=np.int64), nodes])

    def n_in_order(self, start: int) -> int:
        """Number of first keys in the order of positions and before all rows from `start` on."""
        return self.prefix

    def allowed(self, start: int, end: int, window: int | None, first: int = 0) -> np.ndarray:
        """Return bool [end - start, keys]: whether a new row start..end sees a key.

        first: first key of the result, at most `n_in_order`.
        """
        nodes = self.visible[start:end, : self.first_new + end]
        before = np.ones((end - start, self.prefix - first), dtype=bool)
        allowed = np.concatenate([before, nodes], axis=1)
        if window is not None:
            positions = self.key_positions(end)[first:]
            allowed &= self.new_positions[start:end, None] - positions[None, :] < window
        return allowed

    def looking_ahead(self) -> PassLayout:
        """Return the layout in which all new rows see one another; for a pass without padding."""
        visible = self.visible.copy()
        visible[:, self.first_new :] = True
        return PassLayout(self.prefix, self.node_positions, visible)

    def padded(self, n_more: int) -> PassLayout:
        """Return the layout with `n_more` copies of the last row, which no other row sees."""
        last = np.repeat(self.visible[-1:], n_more, axis=0)
        visible = np.concatenate([self.visible, last])
        own = np.zeros((len(visible), n_more), dtype=bool)
        own[self.n_new :] = np.eye(n_more, dtype=bool)
        positions = np.pad(self.node_positions, (0, n_more), mode="edge")
        return PassLayout(self.prefix, positions, np.concatenate([visible, own], axis=1))

    def spans(self, start: int, end: int, window: int | None) -> list[Span]:
        """Return spans in order that cover all keys which any new row start..end sees."""
        n_nodes = self.first_new + end
        nodes = self.visible[start:end, :n_nodes]
        positions = self.new_positions[start:end]
        if window is not None:
            distance = positions[:, None] - self.node_positions[None, :n_nodes]
            nodes = nodes & (distance < window)
        spans = _prefix_spans(self.prefix, positions, window)
        return _joined([*spans, Span(self.prefix, self.prefix + n_nodes, nodes)])


class CausalLayout(PassLayout):
    """Layout of a prompt: `n_new` rows after the prefix, each of which sees all rows before it.

    The quadratic mask is built only for the rows asked for.
    """

    def __init__(self, prefix: int, n_new: int, n_more: int = 0) -> None:
        """n_more: padding rows at the last row's position, for a short run."""
        positions = prefix + np.arange(n_new, dtype=np.int64)
        positions = np.pad(positions, (0, n_more), mode="edge")
        super().__init__(prefix, positions, np.empty((n_new + n_more, 0), dtype=bool))

    def n_in_order(self, start: int) -> int:
        return self.prefix + start

    def allowed(self, start: int, end: int, window: int | None, first: int = 0) -> np.ndarray:
        before = self.prefix + start - first
        allowed = np.ones((end - start, before + end - start), dtype=bool)
        allowed[:, before:] = np.tri(end - start, dtype=bool)  # earlier keys are all visible
        if window is not None:
            allowed &= ~np.tri(*allowed.shape, k=before - window, dtype=bool)
        return allowed

    def looking_ahead(self) -> CausalLayout:
        return self  # appended tokens are certain, and see those before them

    def padded(self, n_more: int) -> CausalLayout:
        return CausalLayout(self.prefix, self.n_new, n_more)

    def spans(self, start: int, end: int, window: int | None) -> list[Span]:
        first, num_tokens = self.prefix + start, end - start
        spans = _prefix_spans(first, self.new_positions[start:end], window)
        if num_tokens == 1:
            own = Span(first, first + 1)
        elif window is None or window >= num_tokens:
            own = Span(first, first + num_tokens, is_causal=True)
        else:
            own = Span(first, first + num_tokens, self.allowed(start, end, window)[:, first:])
        return _joined([*spans, own])


class ContextLayout(PassLayout):
    """Layout of `n_new` rows without keys of their own, which all see another model's prefix and
    are at the position after it."""

    def __init__(self, prefix: int, n_new: int) -> None:
        """prefix: at least 1."""
        positions = np.full(n_new, prefix, dtype=np.int64)
        super().__init__(prefix, positions, np.empty((n_new, 0), dtype=bool))

    def n_keys(self, end: int) -> int:
        return self.prefix

    def key_positions(self, end: int) -> np.ndarray:
        return np.arange(self.prefix, dtype=np.int64)

    def n_in_order(self, start: int) -> int:
        return self.prefix - 1  # attention computes with at least one key after these

    def allowed(self, start: int, end: int, window: int | None, first: int = 0) -> np.ndarray:
        distance = self.prefix - self.key_positions(end)[first:]
        sees = distance < (self.prefix + 1 if window is None else window)
        return np.repeat(sees[None], end - start, axis=0)

    def looking_ahead(self) -> ContextLayout:
        return self

    def padded(self, n_more: int) -> ContextLayout:
        return ContextLayout(self.prefix, self.n_new + n_more)

    def spans(self, start: int, end: int, window: int | None) -> list[Span]:
        return _joined(_prefix_spans(self.prefix, self.new_positions[start:end], window))


def _prefix_spans(prefix: int, positions: np.ndarray, window: int | None) -> list[Span]:
    """Return the spans of the keys 0 .. prefix-1 for later rows at `positions`.

    With a window, keys that no row sees are left out, and only keys at the window's edge, as many
    as the rows differ in position, have a mask.
    """
    if window is None:
        return [Span(0, prefix)]
    oldest = positions - window + 1  # position of the first visible key
    first, full = (int(min(max(at, 0), prefix)) for at in (oldest.min(), oldest.max()))
    edge = np.arange(first, full)[None, :] >= oldest[:, None]
    return [Span(first, full, edge), Span(full, prefix)]


def _joined(spans: list[Span]) -> list[Span]:
    """Return the spans without empty ones, with adjacent ones that need no mask joined."""
    joined: list[Span] = []
    for span in spans:
        if span.start == span.end:
            continue
        if span.allowed is not None and span.allowed.all():
            span = Span(span.start, span.end)
        last = joined[-1] if joined else None
        if last is not None and last.end == span.start and _is_plain(last) and _is_plain(span):
            joined[-1] = Span(last.start, span.end)
        else:
            joined.append(span)
    return joined


def _is_plain(span: Span) -> bool:
    return span.allowed is None and not span.is_causal
