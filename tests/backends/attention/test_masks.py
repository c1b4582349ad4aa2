"""A prompt's mask, made for the rows asked for, is that of a chain of nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.masks import additive_mask, segmented_mask


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_additive_mask(dtype: torch.dtype) -> None:
    mask = additive_mask(CausalLayout(2, 3), 1, 3, None, dtype)
    low = torch.finfo(dtype).min
    assert mask.tolist() == [[[[0, 0, 0, 0, low], [0, 0, 0, 0, 0]]]]


def seen_in(layout: PassLayout, start: int, end: int, window: int | None) -> np.ndarray:
    """Bool [rows, keys] put together again from a layout's spans, which must not overlap."""
    seen = np.zeros((end - start, layout.prefix + layout.first_new + end), dtype=bool)
    last = 0
    for span in layout.spans(start, end, window):
        assert last <= span.start < span.end
        last, shape = span.end, (end - start, span.end - span.start)
        part = np.tri(*shape, dtype=bool) if span.is_causal else np.ones(shape, dtype=bool)
        seen[:, span.start : span.end] = part if span.allowed is None else span.allowed
    return seen


@given(
    prefix=st.integers(0, 9),
    n_new=st.integers(1, 9),
    window=st.none() | st.integers(1, 20),
    is_prompt=st.booleans(),
    data=st.data(),
)
def test_spans_are_the_mask(prefix: int, n_new: int, window: int | None, is_prompt, data) -> None:
    start = data.draw(st.integers(0, n_new - 1))
    end = data.draw(st.integers(start + 1, n_new))
    layout = CausalLayout(prefix, n_new)
    if not is_prompt:
        parents = [data.draw(st.integers(-1, i - 1)) for i in range(n_new + 2)]
        visible, depths = np.eye(n_new + 2, dtype=bool), np.zeros(n_new + 2, dtype=np.int64)
        for node, parent in enumerate(parents):
            if parent >= 0:
                visible[node] |= visible[parent]
                depths[node] = depths[parent] + 1
        layout = PassLayout(prefix, prefix + depths, visible[2:])
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


def test_masks_of_segments_are_finite_and_aligned() -> None:
    """Half of the most negative value: kernels scale it by log2(e)."""
    tree = PassLayout(5, np.array([5, 5]), np.eye(2, dtype=bool))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = segmented_mask(tree, 0, 2, None, dtype, torch.device("cpu"))
        (prefix, nodes), half = found.segments, torch.finfo(dtype).min / 2
        assert (prefix.mask, found.n_keys) == (None, 7)
        assert nodes.mask is not None
        assert nodes.mask.tolist() == [[[[0, half], [half, 0]]]]
        assert nodes.mask.stride(2) % 16 == 0
        assert found.nbytes == 2 * 16 * dtype.itemsize
