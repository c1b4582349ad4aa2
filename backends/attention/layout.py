"""Who sees whom in one forward: a prefix, followed by a tree of nodes. Arithmetic, no tensors.

Windows are by position, since the rows of a tree are not in the order of their positions. Nearly
all of a mask would be zeros, because every node sees the prefix. So a layout can also be asked for
`spans`: runs of keys, of which only those that some rows see and others do not come with a mask
(backends/attention/segments.py computes with them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Span:
    """Keys start..end of the cache and which of the rows may look at them.

    allowed [rows, end - start]: None where every row sees all of them.
    is_causal: row i sees the first i + 1 of them; `allowed` is None then.
    """

    start: int
    end: int
    allowed: np.ndarray | None = None
    is_causal: bool = False


@dataclass(frozen=True)
class PassLayout:
    """Who sits where in one forward: rows already cached, and the new ones.

    prefix : committed rows, at positions 0 .. prefix-1
    node_positions [nodes] : positions of the rows after the prefix, new ones included
    visible [new, nodes] : which of those rows each new row may look at
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

    def key_positions(self, end: int) -> np.ndarray:
        """Positions of the keys that exist once `end` new rows are cached, [keys]."""
        nodes = self.node_positions[: self.first_new + end]
        return np.concatenate([np.arange(self.prefix, dtype=np.int64), nodes])

    def n_in_order(self, start: int) -> int:
        """So many first keys are in the order of positions and before all rows from `start` on."""
        return self.prefix

    def allowed(self, start: int, end: int, window: int | None, first: int = 0) -> np.ndarray:
        """Bool [end - start, keys]: what the new rows start..end may look at.

        first: the first key asked for, of those that `n_in_order` counts.
        """
        nodes = self.visible[start:end, : self.first_new + end]
        before = np.ones((end - start, self.prefix - first), dtype=bool)
        allowed = np.concatenate([before, nodes], axis=1)
        if window is not None:
            positions = self.key_positions(end)[first:]
            allowed &= self.new_positions[start:end, None] - positions[None, :] < window
        return allowed

    def padded(self, n_more: int) -> PassLayout:
        """With so many more rows behind, each as the last one is, whom no other row sees."""
        last = np.repeat(self.visible[-1:], n_more, axis=0)
        visible = np.concatenate([self.visible, last])
        own = np.zeros((len(visible), n_more), dtype=bool)
        own[self.n_new :] = np.eye(n_more, dtype=bool)
        positions = np.pad(self.node_positions, (0, n_more), mode="edge")
        return PassLayout(self.prefix, positions, np.concatenate([visible, own], axis=1))

    def spans(self, start: int, end: int, window: int | None) -> list[Span]:
        """Spans that cover all keys which any of the new rows start..end may look at, in order."""
        n_nodes = self.first_new + end
        nodes = self.visible[start:end, :n_nodes]
        positions = self.new_positions[start:end]
        if window is not None:
            distance = positions[:, None] - self.node_positions[None, :n_nodes]
            nodes = nodes & (distance < window)
        spans = _prefix_spans(self.prefix, positions, window)
        return _joined([*spans, Span(self.prefix, self.prefix + n_nodes, nodes)])


class CausalLayout(PassLayout):
    """A run of `n_new` rows after the prefix, each of which sees all before it.

    The prompt's layout: the quadratic mask is made only for the rows asked for.
    """

    def __init__(self, prefix: int, n_new: int, n_more: int = 0) -> None:
        """n_more: rows at the last one's position, which fill a short run up."""
        positions = prefix + np.arange(n_new, dtype=np.int64)
        positions = np.pad(positions, (0, n_more), mode="edge")
        super().__init__(prefix, positions, np.empty((n_new + n_more, 0), dtype=bool))

    def n_in_order(self, start: int) -> int:
        return self.prefix + start

    def allowed(self, start: int, end: int, window: int | None, first: int = 0) -> np.ndarray:
        before = self.prefix + start - first
        allowed = np.ones((end - start, before + end - start), dtype=bool)
        allowed[:, before:] = np.tri(end - start, dtype=bool)  # all before them is in view
        if window is not None:
            allowed &= ~np.tri(*allowed.shape, k=before - window, dtype=bool)
        return allowed

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


def _prefix_spans(prefix: int, positions: np.ndarray, window: int | None) -> list[Span]:
    """Keys at the positions 0 .. prefix-1, for rows at `positions`, which lie behind them.

    With a window: those that no row sees any more are left out, and those that some rows see are
    as many as the rows differ in position.
    """
    if window is None:
        return [Span(0, prefix)]
    oldest = positions - window + 1  # position of the first key in view
    first, full = (int(min(max(at, 0), prefix)) for at in (oldest.min(), oldest.max()))
    edge = np.arange(first, full)[None, :] >= oldest[:, None]
    return [Span(first, full, edge), Span(full, prefix)]


def _joined(spans: list[Span]) -> list[Span]:
    """Without empty spans, and those that need no mask as long as they can be."""
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
