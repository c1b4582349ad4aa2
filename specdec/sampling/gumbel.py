"""Gumbel noise that is a function of (seed, absolute position, token id) only.

argmax(log p + g), with standard Gumbel noise g, is an exact sample of p. With g fixed in this way a
sampled sequence is a function of the target and the seed: the draft, the tree, the batch and the
memory budget have no influence on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK = 4  # numbers that Philox makes per counter value
SMALLEST_UNIFORM = 2.0**-54  # half of the generator's resolution, in place of an exact 0


def _uniforms(seed: int, position: int, n: int, n_skipped: int = 0) -> NDArray[np.float64]:
    """Return `n` uniforms in (0, 1) of the stream keyed by (seed, position), after `n_skipped`,
    which must be a multiple of the generator's block."""
    key = np.array([seed, position], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=n_skipped // _BLOCK)
    uniforms = np.random.Generator(philox).random(n)
    return np.maximum(uniforms, SMALLEST_UNIFORM, out=uniforms)


def gumbel_noise(seed: int, position: int, n: int) -> NDArray[np.float64]:
    """Return standard Gumbel noise of the tokens 0..n-1 at an absolute position, float64 [n].

    Prefix-stable: a token's noise does not depend on n, so that a draft whose vocabulary is padded
    to another size sees the same noise. `seed` and `position` are 64-bit words, both ≥ 0.
    """
    return -np.log(-np.log(_uniforms(seed, position, n)))


def gumbel_at(seed: int, position: int, token_ids: ArrayLike) -> NDArray[np.float64]:
    """Return `gumbel_noise` of these tokens only: the two logarithms are most of its cost."""
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size == 0:
        return np.empty(0, dtype=np.float64)
    start = int(ids.min()) // _BLOCK * _BLOCK
    uniforms = _uniforms(seed, position, int(ids.max()) + 1 - start, start)
    return -np.log(-np.log(uniforms[ids - start]))
