"""Masks of a layout as tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.attention.batch import BatchLayout
from backends.attention.layout import CausalLayout, PassLayout
from backends.attention.masks import additive_mask, segmented_mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_additive_mask(dtype: torch.dtype) -> None:
    mask = additive_mask(BatchLayout.of(CausalLayout(2, 3)), 1, 3, None, dtype)
    low = torch.finfo(dtype).min
    assert mask.tolist() == [[[[0, 0, 0, 0, low], [0, 0, 0, 0, 0]]]]


def test_masks_of_segments_are_finite_and_aligned() -> None:
    """Masked entries are half of the most negative value: kernels scale them by log2(e)."""
    tree = PassLayout(5, np.array([5, 5]), np.eye(2, dtype=bool))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        actual = segmented_mask(BatchLayout.of(tree), 0, 2, None, dtype, torch.device("cpu"))
        (prefix, nodes), half = actual.parts[0].segments, torch.finfo(dtype).min / 2
        assert (prefix.mask, actual.n_keys) == (None, 7)
        assert nodes.mask is not None
        assert nodes.mask.tolist() == [[[[0, half], [half, 0]]]]
        assert nodes.mask.stride(2) % 16 == 0
        assert actual.nbytes == 2 * 16 * dtype.itemsize
