"""Blocked attention: correct, and a row's bits do not depend on the other rows of its pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from attention_cases import Case, random_tree
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.attention import blocks, row_groups, scores
from backends.attention.batch import BatchLayout
from backends.attention.blocked_mask import blocked_mask
from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.scores import Scratch

PREFIXES = [0, 1, 5, 62, 63, 64, 65, 127, 128, 190, 300]
LAYOUTS = st.builds(
    lambda prefix, n_live, n_new, seed: (
        CausalLayout(prefix, n_new)
        if n_live is None
        else random_tree(prefix, n_live, n_new, np.random.default_rng(seed))
    ),
    st.sampled_from(PREFIXES),
    st.none() | st.integers(0, 12),
    st.integers(1, 40),
    st.integers(0, 99),
)
WINDOWS = st.none() | st.sampled_from([1, 2, 63, 64, 65, 130]) | st.integers(1, 400)
HEADS = st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1), (6, 3)])
DIMS = st.sampled_from([(8, 8), (64, 64), (24, 16), (5, 11), (12, 96)])
OPTIONS = st.fixed_dictionaries(
    {"softcap": st.none() | st.just(1.5), "has_sinks": st.booleans(), "has_bias": st.booleans()}
)


def part_of(layout: PassLayout, data: st.DataObject) -> tuple[int, int]:
    start = data.draw(st.integers(0, layout.n_new - 1))
    return start, data.draw(st.integers(start + 1, layout.n_new))


def large_tree(prefix: int, n_nodes: int) -> PassLayout:
    """A tree so bushy that one block of positions holds more nodes than one product may take."""
    return random_tree(prefix, 3, n_nodes, np.random.default_rng(n_nodes))


@settings(max_examples=60)
@given(
    layout=LAYOUTS,
    window=WINDOWS,
    heads=HEADS,
    dims=DIMS,
    options=OPTIONS,
    data=st.data(),
)
def test_it_is_attention(layout, window, heads, dims, options, data) -> None:
    case = Case(layout, part_of(layout, data), window, heads=heads, dims=dims, **options)
    actual, expected = case.together(), case.expected()
    assert actual.shape == expected.shape
    # Scores of tens, from a bias, have an ulp of 4e-6.
    assert (actual - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 290])
def test_half_precision_is_rounded_once(dtype: torch.dtype, window: int | None) -> None:
    layout = random_tree(300, 5, 40, np.random.default_rng(0))
    case = Case(layout, None, window, dtype=dtype, dims=(64, 64))
    actual, expected = case.together(), case.expected()
    assert actual.dtype == dtype
    assert ((actual - expected).abs() <= torch.finfo(dtype).eps * expected.abs() + 1e-5).all()


@settings(max_examples=60)
@given(
    layout=LAYOUTS,
    window=WINDOWS,
    heads=HEADS,
    dims=DIMS,
    options=OPTIONS,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.data(),
)
def test_a_row_has_the_bits_that_it_has_alone(
    layout, window, heads, dims, options, dtype, data
) -> None:
    start, end = part_of(layout, data)
    case = Case(layout, (start, end), window, heads=heads, dims=dims, dtype=dtype, **options)
    some = {0, end - start - 1, data.draw(st.integers(0, end - start - 1))}
    assert case.differing(sorted(some)) == []


@pytest.mark.parametrize("prefix", [0, 63, 64, 190])
@pytest.mark.parametrize("window", [None, 20, 100])
def test_rows_of_a_large_tree_have_the_bits_that_they_have_alone(
    prefix: int, window: int | None
) -> None:
    layout = large_tree(prefix, 290)
    case = Case(layout, None, window, dims=(16, 16))
    groups = blocked_mask(BatchLayout.of(layout), 0, 290, window, case.limits).groups
    assert len(groups) > 1
    assert [(a.end, b.start) for a, b in zip(groups, groups[1:], strict=False)] == [
        (group.end, group.end) for group in groups[:-1]
    ]
    assert max(max(group.widths) for group in groups) <= case.limits.max_keys
    assert case.differing([*range(0, 290, 29), 289]) == []
    assert (case.together() - case.expected()).abs().max() <= 1e-5


@settings(max_examples=30)
@given(
    layout=LAYOUTS,
    window=WINDOWS,
    n_more=st.integers(1, 9),
    options=OPTIONS,
)
def test_padding_rows_change_no_bit(layout, window, n_more, options) -> None:
    padded = layout.padded(n_more)
    case, more = Case(layout, None, window, **options), Case(padded, None, window, **options)
    num_tokens, n_keys = layout.n_new, case.states[1].shape[2]
    for own, filled in zip(case.states, more.states, strict=True):
        n_same = num_tokens if own is case.states[0] else n_keys
        filled[:, :, :n_same] = own
    actual = more.together()
    assert actual.isfinite().all()
    assert torch.equal(actual[:num_tokens], case.together())


@pytest.mark.parametrize("heads", [(6, 3), (4, 4), (5, 5), (4, 1)])
@pytest.mark.parametrize("n_scores", [10**9, 30_000, 7_000, 0], ids="all heads some one".split())
@pytest.mark.parametrize("n_columns", [10**9, 300, 128, 0], ids="all three two one".split())
def test_little_scratch_changes_no_bit(
    heads: tuple[int, int], n_scores: int, n_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some heads, some rows of them, and some blocks of their keys are computed at a time."""
    options = {"heads": heads, "has_sinks": True, "has_bias": True}
    for window in (None, 140):
        case = Case(random_tree(330, 2, 30, np.random.default_rng(3)), None, window, **options)
        monkeypatch.undo()
        expected = case.together()
        row_groups.spans_of.cache_clear()
        for module in (blocks, scores):
            monkeypatch.setattr(module, "MAX_BLOCKED_SCORE_BYTES", 4 * n_scores)
        for module in (blocks, row_groups):
            monkeypatch.setattr(module, "SPAN_BYTES", 4 * n_columns * heads[1] * (8 + 16))
        assert torch.equal(case.together(), expected)
        row_groups.spans_of.cache_clear()


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("n_threads", [2, 3])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2)])
@pytest.mark.parametrize("dims", [(8, 8), (96, 96)])
def test_threads_that_share_a_product_do_not_change_its_order(
    n_threads: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    """A product alone in its batch is split among threads, down to a row or two."""
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        for n_new in (5, 7, 11):
            layout = random_tree(190, 0, n_new, np.random.default_rng(n_new))
            assert Case(layout, heads=heads, dims=dims).differing(list(range(n_new))) == []
    finally:
        torch.set_num_threads(before)


def test_numbers_that_a_pass_before_left_behind_do_not_come_back() -> None:
    """Columns without a key keep stale numbers; the layers of a pass alternate between them."""
    layout = large_tree(63, 290)
    mask = blocked_mask(BatchLayout.of(layout), 0, 290, None)
    query, key, value = Case(layout).states
    expected = mask.attend(query, key, value, 0.4)
    mask.attend(query, 50 * key, -1e30 * value, 0.4)
    assert torch.equal(mask.attend(query, key, value, 0.4), expected)


@pytest.mark.parametrize("min_batch_tokens", [None, 32])
def test_masks_that_take_turns_with_their_scratch_change_no_bit(
    min_batch_tokens: int | None,
) -> None:
    """Layers with and without a window, of equal and of different widths."""
    layout, scratch = random_tree(190, 3, 40, np.random.default_rng(0)), Scratch()
    windows = [None, 20, 64, 130, 65]
    limits = Case(layout).limits
    limits = replace(limits, min_batch_tokens=min_batch_tokens or limits.min_batch_tokens)
    masks = [blocked_mask(BatchLayout.of(layout), 0, 40, w, limits, scratch) for w in windows]
    for dims in ((8, 8), (16, 40), (8, 8)):
        for window, mask in zip(windows, masks, strict=True):
            case = Case(layout, None, window, dims=dims)
            assert torch.equal(mask.attend(*case.states, case.scale)[0], case.together())


Block: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Mistakes:
    """Variants that compute the same numbers in another order."""

    @staticmethod
    def blocks_from_the_prefix_end(patch: pytest.MonkeyPatch) -> None:
        """Count positions from another origin in every pass."""
        right = PassLayout.key_positions

        def shifted(self: PassLayout, end: int) -> np.ndarray:
            return right(self, end) + (-self.prefix % row_groups.BLOCK_KEYS)

        patch.setattr(PassLayout, "key_positions", shifted)

    @staticmethod
    def last_block_first(patch: pytest.MonkeyPatch) -> None:
        """Process the last block first if there is more than one row."""
        right = scores.Scores.blocks

        def reversed_blocks(self: Any, *given: Any) -> Iterator[Block]:
            if self._group.end - self._group.start == 1:
                return right(self, *given)
            return reversed([(shares, values.clone()) for shares, values in right(self, *given)])

        patch.setattr(scores.Scores, "blocks", reversed_blocks)

    @staticmethod
    def one_block_in_two_parts(patch: pytest.MonkeyPatch) -> None:
        """Sum a block in two parts, as a library does that splits long rows."""
        right = scores.Scores.blocks

        def in_parts(self: Any, *given: Any) -> Iterator[Block]:
            for shares, values in right(self, *given):
                if self._group.end - self._group.start == 1:
                    yield shares, values
                else:
                    first = shares.clone()
                    first[..., 32:] = 0.0
                    yield first, values
                    yield shares - first, values

        patch.setattr(scores.Scores, "blocks", in_parts)


@pytest.mark.parametrize(
    "mistake",
    [
        Mistakes.blocks_from_the_prefix_end,
        Mistakes.last_block_first,
        Mistakes.one_block_in_two_parts,
    ],
)
def test_another_order_of_the_sums_is_found(mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check behind these tests detects a changed order of sums."""
    layout = random_tree(190, 3, 40, np.random.default_rng(0))
    case = Case(layout, dims=(64, 64))
    assert case.differing(list(range(40))) == []
    mistake(monkeypatch)
    assert (case.together() - case.expected()).abs().max() <= 1e-5
    assert case.differing(list(range(40))) != []


def test_keys_that_are_too_many_for_one_product_are_found() -> None:
    """Libraries that split such long sums are detected; others need no groups of rows."""
    case, rows = Case(large_tree(0, 290), dims=(64, 64)), list(range(0, 290, 29))
    assert case.differing(rows) == []
    case.limits = replace(case.limits, max_keys=10_000)
    if not case.differing(rows):
        pytest.skip("this library adds all terms of a product one after the other")


def test_scratch_is_float32_whatever_torchs_default_is() -> None:
    """Building a model in another thread changes torch's default dtype for a moment."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert Scratch().take("scores", 2, 3).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
