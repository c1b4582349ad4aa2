"""Layout of gpt-oss as published: the experts of a layer in MXFP4, everything else in bf16.

A matrix of experts [n, n_out, n_in] is stored as `NAME_blocks` uint8 [n, n_out, n_in / 32, 16], two
codes of float4_e2m1 in a byte, and `NAME_scales` uint8 [n, n_out, n_in / 32], exponents plus 127
(OCP Microscaling Formats 1.0). The weights are random, so all groups have one scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from bench.synth.formats import BF16, WeightFormat
from bench.synth.layouts import StoredTensor
from bench.synth.shapes import SynthError
from bench.synth.tensors import TensorPlan
from bench.synth.weights import TensorMaker

GROUP = 32
"""Weights with one scale."""
_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_MIDDLES = (_VALUES[1:] + _VALUES[:-1]) / 2
_SCALE = 2.0**-7
"""Scale of weights of `TensorMaker`: they have a deviation of 0.02, so few exceed 6 of it."""
_CHUNK_BYTES = 2**24


def _encode_codes(groups: np.ndarray) -> np.ndarray:
    """Return uint8 [n, 16] of float32 [n, 32]: the nearest codes, the first in the low half."""
    scaled = groups / np.float32(_SCALE)
    codes = np.searchsorted(_MIDDLES, np.abs(scaled)).astype(np.uint8)
    codes |= (scaled < 0).astype(np.uint8) << 3
    pairs: np.ndarray = codes[:, ::2] | codes[:, 1::2] << 4
    return pairs


_CODES = WeightFormat("U8", GROUP, GROUP // 2, _encode_codes)


class GptOssLayout:
    """Layout of the tensors of a gpt-oss; see the module."""

    def form_of(self, plan: TensorPlan) -> WeightFormat:
        """Return the format that `TensorMaker` makes for a tensor."""
        return _CODES if _is_quantised(plan) else BF16

    def n_bytes(self, plan: TensorPlan) -> int:
        return sum(stored.n_bytes for stored in self.stored(plan))

    def stored(self, plan: TensorPlan) -> list[StoredTensor]:
        """Return the stored tensors of a plan, in order. Raises SynthError for unsuitable sizes."""
        if not _is_quantised(plan):
            return [StoredTensor(plan.name, "BF16", plan.shape)]
        *outer, n_in = plan.shape
        if n_in % GROUP:
            raise SynthError(f"{plan.name} has rows of {n_in} weights, and MXFP4 takes {GROUP}s")
        groups = (*outer, n_in // GROUP)
        return [
            StoredTensor(f"{plan.name}_blocks", "U8", (*groups, GROUP // 2)),
            StoredTensor(f"{plan.name}_scales", "U8", groups),
        ]

    def chunks(self, plan: TensorPlan, maker: TensorMaker) -> Iterator[memoryview]:
        """Yield the bytes of the stored tensors, in order."""
        yield from maker.chunks(plan)
        if not _is_quantised(plan):
            return
        n_left = plan.n_weights // GROUP
        scales = bytes([127 + round(math.log2(_SCALE))]) * min(n_left, _CHUNK_BYTES)
        while n_left:
            part = memoryview(scales)[:n_left]
            yield part
            n_left -= len(part)


def _is_quantised(plan: TensorPlan) -> bool:
    return plan.name.endswith(("experts.gate_up_proj", "experts.down_proj"))
