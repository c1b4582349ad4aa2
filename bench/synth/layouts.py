"""Layouts of a grown checkpoint folder: floats, or quantised as other libraries do it.

The matrices of the decoder layers are quantised; embeddings, norms and head stay bf16. A matrix is
made in float32, some of its rows at a time, and quantised as it is written. Zeros stay zeros; other
weights are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.synth.formats import BF16, F32, WeightFormat
from bench.synth.hybrid import tensor_plans
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.tensors import TensorPlan
from bench.synth.weights import TensorMaker
from offload.formats.safetensors import DTYPE_BITS

_STEP = 128  # rows and columns of a block of fp8; the weights of a group of int4
_LARGEST_FP8 = 448.0  # of float8_e4m3
_EPSILON = 2.0**-7  # the scale of a group of zeros: bf16's epsilon, as compressed-tensors has it


@dataclass(frozen=True)
class StoredTensor:
    """Tensor as listed in a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class TensorLayout(Protocol):
    """Layout of the tensors of a folder."""

    def n_bytes(self, plan: TensorPlan) -> int:
        """Return the bytes of the stored tensors of a plan."""

    def stored(self, plan: TensorPlan) -> list[StoredTensor]:
        """Return the stored tensors of a plan, in order."""

    def chunks(self, plan: TensorPlan, maker: TensorMaker) -> Iterator[memoryview]:
        """Yield the bytes of the stored tensors, in order."""


class Scheme(Protocol):
    """Quantisation scheme of a matrix."""

    settings: Mapping[str, Any]
    """`quantization_config` in config.json."""

    def stored(self, module: str, n_out: int, n_in: int) -> list[StoredTensor]:
        """Return the stored tensors of a module's matrix."""

    def quantise(self, matrix: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield the contents of `stored`, in order, from the matrix's rows, float32 [n, n_in], some
        multiple of _STEP at a time."""


class Fp8Blocks:
    """DeepSeek's scheme: float8_e4m3, and a float32 scale for each block of 128 x 128."""

    settings: Mapping[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_STEP, _STEP],
    }

    def stored(self, module: str, n_out: int, n_in: int) -> list[StoredTensor]:
        return [
            StoredTensor(f"{module}.weight", "F8_E4M3", (n_out, n_in)),
            StoredTensor(f"{module}.weight_scale_inv", "F32", (n_out // _STEP, n_in // _STEP)),
        ]

    def quantise(self, matrix: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        all_scales = []
        for rows in matrix:
            blocks = rows.view(len(rows) // _STEP, _STEP, rows.shape[1] // _STEP, _STEP)
            scales = blocks.abs().amax((1, 3)) / _LARGEST_FP8
            scales[scales == 0] = 1
            yield (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            all_scales.append(scales)
        yield torch.cat(all_scales)


class Int4Groups:
    """compressed-tensors' scheme "pack-quantized": 4-bit symmetric, and a bf16 scale for each 128
    weights of a row."""

    settings: Mapping[str, Any] = {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "dynamic": False,
                    "group_size": _STEP,
                    "num_bits": 4,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }

    def stored(self, module: str, n_out: int, n_in: int) -> list[StoredTensor]:
        return [
            StoredTensor(f"{module}.weight_packed", "I32", (n_out, n_in // 8)),
            StoredTensor(f"{module}.weight_scale", "BF16", (n_out, n_in // _STEP)),
            StoredTensor(f"{module}.weight_shape", "I64", (2,)),
        ]

    def quantise(self, matrix: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
        all_scales = []
        for rows in matrix:
            groups = rows.unflatten(1, (-1, _STEP))
            scales = (groups.abs().amax(-1) / 7.5).bfloat16()
            scales[scales == 0] = _EPSILON
            values = (groups / scales.float()[:, :, None]).round_().clamp_(-8, 7)
            nibbles = values.add_(8).to(torch.uint8)
            # The first of eight lies in the lowest bits of their int32.
            yield nibbles[..., ::2] | nibbles[..., 1::2] << 4
            all_scales.append(scales)
        yield torch.cat(all_scales)
        yield torch.tensor([sum(map(len, all_scales)), rows.shape[1]])


@dataclass(frozen=True)
class Layout:
    """Layout of a grown model; see `TensorLayout`."""

    form: WeightFormat  # of what is not quantised
    scheme: Scheme | None = None  # of the layers' matrices

    @property
    def block_size(self) -> int:
        return self.form.block_size if self.scheme is None else _STEP

    @property
    def config(self) -> dict[str, Any]:
        """Entries for config.json."""
        return {} if self.scheme is None else {"quantization_config": self.scheme.settings}

    def model_bytes(self, shape: LlamaShape) -> int:
        """Return the bytes of all weights of a model of this shape."""
        plans = tensor_plans(shape, shape)
        return sum(map(self.n_bytes, plans))

    def n_bytes(self, plan: TensorPlan) -> int:
        return sum(stored.n_bytes for stored in self.stored(plan))

    def form_of(self, plan: TensorPlan) -> WeightFormat:
        """Return the format that `TensorMaker` makes for a tensor."""
        return F32 if self._is_quantised(plan) else self.form

    def stored(self, plan: TensorPlan) -> list[StoredTensor]:
        """Return the stored tensors of a plan, in order. Raises SynthError for unsuitable sizes."""
        if self.scheme is None or not self._is_quantised(plan):
            return [StoredTensor(plan.name, self.form.name, plan.shape)]
        n_out, n_in = plan.shape
        if n_out % _STEP or n_in % _STEP:
            raise SynthError(
                f"{plan.name} is [{n_out}, {n_in}], and fp8 and int4 take multiples of {_STEP}: "
                "choose another shape, or bf16"
            )
        return self.scheme.stored(plan.name.removesuffix(".weight"), n_out, n_in)

    def chunks(self, plan: TensorPlan, maker: TensorMaker) -> Iterator[memoryview]:
        """Yield the bytes of the stored tensors, in order."""
        if self.scheme is None or not self._is_quantised(plan):
            yield from maker.chunks(plan)
            return
        rows = (
            torch.frombuffer(chunk, dtype=torch.float32).view(-1, plan.shape[1])
            for chunk in maker.chunks(plan, _STEP)
        )
        for part in self.scheme.quantise(rows):
            yield memoryview(part.contiguous().view(torch.uint8).numpy()).cast("B")

    def _is_quantised(self, plan: TensorPlan) -> bool:
        return self.scheme is not None and ".layers." in plan.name and len(plan.shape) == 2


LAYOUTS = {
    "bf16": Layout(BF16),
    "fp32": Layout(F32),
    "fp8": Layout(BF16, Fp8Blocks()),
    "int4": Layout(BF16, Int4Groups()),
}
