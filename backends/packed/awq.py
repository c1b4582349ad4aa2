"""4-bit AWQ quantisation in AutoAWQ's "gemm" format.

qweight int32 [in, out / 8] and qzeros int32 [groups, out / 8], both packed along `out`: a word has
the outputs 0, 2, 4, 6, 1, 3, 5 and 7 from the lowest bits on; scales [groups, out].
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


class Awq:
    """AWQ; see Quantisation."""

    name = "INT4_AWQ"
    method = "awq"
    remedy = "download it again"
    separator, whole, n_dims = ".", ".weight", 2
    suffixes: tuple[str, ...] = ("qweight", "scales", "qzeros")
    optional: tuple[str, ...] = ()

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        bits = settings.get("bits", settings.get("w_bit"))
        if bits != 4:
            raise ValueError(f"{shown(bits)} bits, not 4")
        for key in ("version", "format"):  # newer libraries write the second
            value = settings.get(key)
            if value is not None and str(value).lower() != "gemm":
                raise ValueError(f"{key} {shown(value)}, not 'gemm'")
        if settings.get("backend") == "llm-awq":  # uses another order
            raise ValueError("backend 'llm-awq'")

    def is_main(self, record: TensorRecord) -> bool:
        return True

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        n_in, n_words = stored[0].shape
        return n_words * N_IN_WORD, n_in

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        n_out, n_in = shape
        scales, zeros = (n_in // 128, n_out), (n_in // 128, n_out // N_IN_WORD)
        return [("I32", (n_in, n_out // N_IN_WORD)), ("F16", scales), ("I32", zeros)]

    def check(self, tensor: PackedTensor) -> None:
        n_out, n_in = tensor.record.shape
        n_groups = check_groups(tensor.parts[1], 0, n_in)
        n_words = n_out // N_IN_WORD
        scales = (SCALES, [n_groups, n_out])
        check_parts(tensor, [(("I32",), [n_in, n_words]), scales, (("I32",), [n_groups, n_words])])

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        size = settings.get("group_size", settings.get("q_group_size"))
        check_group_sizes([size], tensor.record.shape[1], tensor.parts[1].shape[0])

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor, has_zeros=True)

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        from backends.tiles import awq

        scales = tensor.parts[1]
        values = {
            awq.WORDS: stored[0].data_ptr(),
            awq.SCALES: stored[1].data_ptr(),
            awq.SCALE_KIND: scale_kind(scales.dtype),
            awq.GROUP: tensor.record.shape[1] // scales.shape[0],
            awq.ZEROS: stored[2].data_ptr(),
            awq.N_OUT: tensor.record.shape[0],
        }
        dtype = scales.dtype
        return make_table(
            awq.decode_awq, *form(tensor), written, values, rounded=dtype, by_columns=True
        )

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        words, scales, packed_zeros = typed(tensor, stored)
        zeros = _in_order(packed_zeros)

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            numbers.copy_(_in_order(words[:, start // N_IN_WORD : end // N_IN_WORD]))
            scale(numbers, zeros[start:end], scales[:, start:end].T)

        return by_pieces(tensor.record.shape[1], decode, scales.dtype)


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [n, out / 8] to uint8 [out, n]."""
    unpacked = nibbles(words)  # [n, out / 8, 8]: even outputs, then odd ones
    return unpacked.unflatten(2, (2, 4)).transpose(2, 3).flatten(1).T
