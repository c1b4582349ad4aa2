"""4-bit GPTQ quantisation (AutoGPTQ's first format, "gptq").

qweight int32 [in / 8, out], packed along `in`; qzeros int32 [groups, out / 8], packed along `out`,
one less than the zeros; scales [groups, out]; g_idx int32 [in], the group of each input.
W[o, i] = (q[i, o] - zero[g, o]) * scale[g, o], in the number format of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backends.packed.groups import (
    N_IN_WORD,
    SCALES,
    by_pieces,
    check_group_sizes,
    check_groups,
    nibbles,
    scale,
    scratch_bytes,
)
from backends.packed.tensor import DecodeRows, PackedTensor, check_parts, form, shown, typed
from backends.tiles.stored import Table, make_table, scale_kind
from offload.formats.tensors import TensorRecord


class Gptq:
    """GPTQ; see Quantisation.

    is_reordered: whether the settings say so (desc_act). It affects the expected decoding time
    only: scattered inputs of a group take three times as long as consecutive ones.
    """

    method = "gptq"
    remedy = "download it again"
    separator, whole, n_dims = ".", ".weight", 2
    suffixes: tuple[str, ...] = ("qweight", "scales", "qzeros")
    optional: tuple[str, ...] = ("g_idx",)

    def __init__(self, is_reordered: bool = False) -> None:
        self.is_reordered = is_reordered
        self.name = "INT4_GPTQ_REORDERED" if is_reordered else "INT4_GPTQ"

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        if settings.get("bits") != 4:
            raise ValueError(f"{shown(settings.get('bits'))} bits, not 4")
        for key in ("checkpoint_format", "format"):  # newer libraries write the second
            if settings.get(key) not in (None, "gptq"):
                raise ValueError(f"{key} {shown(settings[key])}, not 'gptq'")
        if settings.get("dynamic"):
            raise ValueError("bits that differ among modules ('dynamic')")

    def is_main(self, record: TensorRecord) -> bool:
        return True

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        n_words, n_out = stored[0].shape
        return n_out, n_words * N_IN_WORD

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        n_out, n_in = shape
        scales, zeros = (n_in // 128, n_out), (n_in // 128, n_out // N_IN_WORD)
        words = (n_in // N_IN_WORD, n_out)
        order = [("I32", (n_in,))] if self.is_reordered else []
        return [("I32", words), ("F16", scales), ("I32", zeros), *order]

    def example_order(self, n_in: int) -> torch.Tensor:
        """Return a g_idx for `example`."""
        generator = torch.Generator().manual_seed(n_in)
        return (torch.randperm(n_in, generator=generator) // 128).to(torch.int32)

    def check(self, tensor: PackedTensor) -> None:
        n_out, n_in = tensor.record.shape
        n_groups = check_groups(tensor.parts[1], 0, n_in)
        if n_out % N_IN_WORD:
            raise ValueError(f"{n_out} outputs, and zeros are packed by {N_IN_WORD}")
        expected = [
            (("I32",), [n_in // N_IN_WORD, n_out]),
            (SCALES, [n_groups, n_out]),
            (("I32",), [n_groups, n_out // N_IN_WORD]),
            (("I32",), [n_in]),
        ]
        check_parts(tensor, expected[: len(tensor.parts)])

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        n_in, n_groups = tensor.record.shape[1], tensor.parts[1].shape[0]
        is_in_order = len(tensor.parts) == len(self.suffixes)
        if is_in_order and n_groups > 1 and settings.get("desc_act"):
            raise ValueError("it has no g_idx, and desc_act says that inputs lie in any order")
        check_group_sizes([settings.get("group_size")], n_in, n_groups, is_in_order)

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor, has_zeros=True)

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        from backends.tiles import four_bits

        scales = tensor.parts[1]
        values = {
            four_bits.CODES: stored[0].data_ptr(),
            four_bits.SCALES: stored[1].data_ptr(),
            four_bits.SCALE_KIND: scale_kind(scales.dtype),
            four_bits.GROUP: tensor.record.shape[1] // scales.shape[0],
            four_bits.ZEROS: stored[2].data_ptr(),
            four_bits.N_OUT: tensor.record.shape[0],
            four_bits.ORDER: 0 if _groups(tensor, stored) is None else stored[3].data_ptr(),
        }
        dtype = scales.dtype
        decoder = four_bits.decode_gptq
        return make_table(decoder, *form(tensor), written, values, rounded=dtype, by_columns=True)

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        words, scales, packed_zeros, *_ = typed(tensor, stored)
        zeros = nibbles(packed_zeros).flatten(1) + 1 & 15
        groups = _groups(tensor, stored)

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            numbers.copy_(nibbles(words[:, start:end]).transpose(0, 1).flatten(1))
            own, zero = scales[:, start:end].T, zeros[:, start:end].T
            if groups is not None:  # inputs of a group are scattered
                own, zero = own.index_select(1, groups), zero.index_select(1, groups)
            scale(numbers, zero, own)

        return by_pieces(tensor.record.shape[1], decode, scales.dtype)


def _groups(tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the group of each input, or None if those of a group are consecutive. Raises
    ValueError for a group that does not exist."""
    _, scales, _, *order = typed(tensor, stored)
    if not order or _ascends(order[0], len(scales)):
        return None
    low, high = torch.aminmax(order[0])
    if low < 0 or high >= len(scales):
        raise ValueError(f"its g_idx names a group that is none of {len(scales)}")
    return order[0].long()


def _ascends(groups: torch.Tensor, n_groups: int) -> bool:
    """Return whether the inputs of each group are consecutive."""
    size = len(groups) // n_groups
    usual = torch.arange(len(groups), device=groups.device, dtype=groups.dtype) // size
    return torch.equal(groups, usual)
