"""A prompt's mask, made for the rows asked for, is that of a chain of nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.masks import CausalLayout, PassLayout, additive_mask


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
