"""Visibility: a prompt is a chain of nodes, spans form the mask, padding rows fill a pass."""

from __future__ import annotations

import numpy as np
from attention_cases import random_tree
from hypothesis import given
from hypothesis import strategies as st

from backends.attention.layout import CausalLayout, PassLayout

LAYOUTS = st.builds(
    lambda prefix, n_live, n_new: (
        CausalLayout(prefix, n_new)
        if n_live is None
        else random_tree(prefix, n_live, n_new, np.random.default_rng(n_new))
    ),
    st.integers(0, 9),
    st.none() | st.integers(0, 3),
    st.integers(1, 9),
)
WINDOWS = st.none() | st.integers(1, 20)


def rows_of(layout: PassLayout, data: st.DataObject) -> tuple[int, int]:
    start = data.draw(st.integers(0, layout.n_new - 1))
    return start, data.draw(st.integers(start + 1, layout.n_new))


@given(
    prefix=st.integers(0, 9),
    n_new=st.integers(1, 9),
    window=st.none() | st.integers(1, 20),
    data=st.data(),
)
def test_a_prompt_is_a_chain(prefix: int, n_new: int, window: int | None, data) -> None:
    start = data.draw(st.integers(0, n_new - 1))
    end = data.draw(st.integers(start + 1, n_new))
    positions = prefix + np.arange(n_new, dtype=np.int64)
    chain = PassLayout(prefix, positions, np.tri(n_new, dtype=bool))
    allowed = CausalLayout(prefix, n_new).allowed(start, end, window)
    assert (allowed == chain.allowed(start, end, window)).all()
    for row, position in enumerate(positions[start:end]):
        seen = np.flatnonzero(allowed[row]).tolist()
        oldest = 0 if window is None else max(0, int(position) - window + 1)
        assert seen == list(range(oldest, int(position) + 1))


def seen_in(layout: PassLayout, start: int, end: int, window: int | None) -> np.ndarray:
    """Bool mask [rows, keys] rebuilt from a layout's spans, which must not overlap."""
    seen = np.zeros((end - start, layout.prefix + layout.first_new + end), dtype=bool)
    last = 0
    for span in layout.spans(start, end, window):
        assert last <= span.start < span.end
        last, shape = span.end, (end - start, span.end - span.start)
        part = np.tri(*shape, dtype=bool) if span.is_causal else np.ones(shape, dtype=bool)
        seen[:, span.start : span.end] = part if span.allowed is None else span.allowed
    return seen


@given(layout=LAYOUTS, window=WINDOWS, data=st.data())
def test_spans_are_the_mask(layout: PassLayout, window: int | None, data) -> None:
    start, end = rows_of(layout, data)
    allowed = layout.allowed(start, end, window)
    assert (seen_in(layout, start, end, window) == allowed).all()


def test_only_what_rows_disagree_about_has_a_mask() -> None:
    tree = PassLayout(1000, np.array([1000, 1001, 1001]), np.tril(np.ones((3, 3), dtype=bool)))
    assert [(s.start, s.end) for s in tree.spans(0, 3, None)] == [(0, 1000), (1000, 1003)]
    windowed = [(s.start, s.end, s.allowed is None) for s in tree.spans(0, 3, 100)]
    assert windowed == [(901, 902, False), (902, 1000, True), (1000, 1003, False)]
    one_row = [(s.start, s.end, s.allowed) for s in tree.spans(0, 1, 100)]
    assert one_row == [(901, 1001, None)]  # plain decoding needs no mask
    prompt = [(s.start, s.end, s.is_causal) for s in CausalLayout(50, 20).spans(10, 20, 512)]
    assert prompt == [(0, 60, False), (60, 70, True)]


@given(layout=LAYOUTS, n_more=st.integers(1, 5), window=WINDOWS)
def test_padding_rows_are_seen_by_no_earlier_row(layout, n_more, window) -> None:
    padded = layout.padded(n_more)
    num_tokens, n_all = layout.n_new, layout.n_new + n_more
    assert type(padded) is type(layout)
    assert (padded.n_new, padded.first_new, padded.prefix) == (
        n_all,
        layout.first_new,
        layout.prefix,
    )
    allowed, own = padded.allowed(0, n_all, window), layout.allowed(0, num_tokens, window)
    assert (allowed[:num_tokens, : own.shape[1]] == own).all()
    assert not allowed[:num_tokens, own.shape[1] :].any()
    assert (padded.allowed(0, num_tokens, window) == own).all()
    assert (padded.key_positions(num_tokens) == layout.key_positions(num_tokens)).all()
    assert (
        padded.new_positions[num_tokens:] == layout.new_positions[-1]
    ).all()  # within the context
    assert allowed[range(n_all), -n_all + np.arange(n_all)].all()  # each row sees itself


@given(layout=LAYOUTS, n_more=st.integers(1, 5), window=WINDOWS)
def test_padding_rows_of_a_tree_see_what_its_last_row_sees(layout, n_more, window) -> None:
    tree = PassLayout(layout.prefix, layout.new_positions, np.tri(layout.n_new, dtype=bool))
    n_keys = layout.prefix + layout.n_new
    allowed = tree.padded(n_more).allowed(0, layout.n_new + n_more, window)
    assert (allowed[layout.n_new :, :n_keys] == allowed[layout.n_new - 1, :n_keys]).all()
    assert (allowed[layout.n_new :, n_keys:] == np.eye(n_more, dtype=bool)).all()


@given(layout=LAYOUTS, window=WINDOWS, data=st.data())
def test_keys_in_order_lie_at_their_position_before_all_rows(layout, window, data) -> None:
    """No mask is needed for these keys: the window alone decides which rows see them."""
    start, end = rows_of(layout, data)
    n_ordered = layout.n_in_order(start)
    assert (layout.key_positions(end)[:n_ordered] == np.arange(n_ordered)).all()
    positions = layout.new_positions[start:end]
    assert n_ordered <= positions.min()
    distance = positions[:, None] - np.arange(n_ordered)
    in_view = np.ones_like(distance, dtype=bool) if window is None else distance < window
    assert (layout.allowed(start, end, window)[:, :n_ordered] == in_view).all()


@given(layout=LAYOUTS, window=WINDOWS, data=st.data())
def test_a_mask_from_some_key_on_is_the_end_of_the_whole_one(layout, window, data) -> None:
    start, end = rows_of(layout, data)
    first = data.draw(st.integers(0, layout.n_in_order(start)))
    whole = layout.allowed(start, end, window)
    assert whole.shape == (end - start, len(layout.key_positions(end)))
    assert (layout.allowed(start, end, window, first) == whole[:, first:]).all()
