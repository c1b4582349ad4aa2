"""float4_e2m1 with a scale for each group of a row: MXFP4 and NVFP4.

A byte has the codes of two neighbouring inputs, the first in the low half. MXFP4 (OCP Microscaling
Formats 1.0): groups of 32 with a power of two, an exponent of 8 bits plus 127. NVFP4: groups of 16
with a float8_e4m3 scale, which is divided by one float32 for the whole matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backends.packed.compressed_int4 import check_compressed
from backends.packed.groups import by_pieces, scratch_bytes
from backends.packed.tensor import DecodeRows, PackedTensor, check_parts, form, typed
from backends.tiles.stored import Table, make_table, scale_kind
from offload.formats.tensors import TensorRecord

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUPS = {"U8": 32, "F8_E4M3": 16}


class Float4:
    """4-bit floats of compressed-tensors; see Quantisation.

    scales: number format of the scales as stored.
    """

    method = "compressed-tensors"
    remedy = "download it again"
    separator, whole, n_dims = ".", ".weight", 2
    optional: tuple[str, ...] = ()

    def __init__(self, name: str, file_format: str, scales: str) -> None:
        self.name, self.file_format, self._scales = name, file_format, scales
        self.group = _GROUPS[scales]
        self.suffixes: tuple[str, ...] = ("weight_packed", "weight_scale")
        if scales == "F8_E4M3":
            self.suffixes += ("weight_global_scale",)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        values = {
            "num_bits": (4,),
            "type": ("float",),
            "strategy": ("group",) if self._scales == "U8" else ("tensor_group",),
            "group_size": (self.group,),
        }
        check_compressed(settings, values, has_plain_inputs=False)

    def is_main(self, record: TensorRecord) -> bool:
        return True

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        n_out, n_pairs = stored[0].shape
        return n_out, 2 * n_pairs

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        n_out, n_in = shape
        parts: list[tuple[str, tuple[int, ...]]] = [("U8", (n_out, n_in // 2))]
        parts.append((self._scales, (n_out, n_in // self.group)))
        return [*parts, *[("F32", (1,)) for _ in self.suffixes[2:]]]

    def check(self, tensor: PackedTensor) -> None:
        n_out, n_in = tensor.record.shape
        if n_in % self.group:
            raise ValueError(f"rows of {n_in} weights are no groups of {self.group}")
        check_parts(
            tensor,
            [
                (("U8",), [n_out, n_in // 2]),
                ((self._scales,), [n_out, n_in // self.group]),
                *[(("F32",), [1]) for _ in self.suffixes[2:]],
            ],
        )

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        """Do nothing: the sizes of groups are fixed, and `check` checks them."""

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor, has_zeros=False)

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        from backends.tiles import four_bits

        values = {
            four_bits.CODES: stored[0].data_ptr(),
            four_bits.SCALES: stored[1].data_ptr(),
            four_bits.SCALE_KIND: scale_kind(self._scales),
            four_bits.GROUP: self.group,
            four_bits.IS_FLOAT: 1,
            four_bits.DIVISOR: stored[2].data_ptr() if len(stored) > 2 else 0,
        }
        return make_table(four_bits.decode_four_bits, *form(tensor), written, values)

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        n_out, n_in = tensor.record.shape
        codes = stored[0].view(n_out, n_in // 2)
        table = torch.tensor([*_VALUES, *(-x for x in _VALUES)], device=codes.device)
        raw = typed(tensor, stored)[1].view(n_out, -1)

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            pairs = codes[start:end]
            own = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1).int()
            numbers.copy_(table[own])
            some = raw[start:end]
            scales = torch.exp2(some.float() - 127) if self._scales == "U8" else some.float()
            if len(stored) > 2:
                scales = scales / stored[2].view(torch.float32)
            grouped = numbers.unflatten(1, (-1, self.group))
            grouped *= scales[:, :, None]

        return by_pieces(n_in, decode)


class StackedMxfp4(Float4):
    """The experts of gpt-oss: all of a layer in one tensor, `NAME_blocks` U8 [experts, n_out,
    groups, 16] and `NAME_scales` U8 [experts, n_out, groups]; the model has [experts, n_in, n_out].
    Matrices of single experts are decoded like others in MXFP4."""

    method = "mxfp4"
    separator, whole, n_dims = "_", "", 4

    def __init__(self) -> None:
        super().__init__("MXFP4_STACKED", "mxfp4", "U8")
        self.suffixes = ("blocks", "scales")

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Do nothing: the format has no settings."""

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        n_experts, n_out, n_groups, n_bytes = stored[0].shape
        return n_experts, n_groups * n_bytes * 2, n_out

    def check(self, tensor: PackedTensor) -> None:
        *experts, n_in, n_out = tensor.record.shape
        if not experts:  # of one expert; its record has the rows first
            n_in, n_out = n_out, n_in
        n_groups = n_in // self.group
        expected = [*experts, n_out, n_groups]
        check_parts(tensor, [(("U8",), [*expected, self.group // 2]), (("U8",), expected)])
