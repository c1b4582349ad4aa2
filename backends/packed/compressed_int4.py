"""4-bit quantisation in groups of a row: compressed-tensors' "pack-quantized".

weight_packed int32 [out, in / 8] has q + 8, the first of eight in the lowest bits; weight_scale
[out, groups]; weight_zero_point int32 [out / 8, groups], packed along `out`, if a group has a zero
point of its own. W = (q - zero) * scale, in the number format of the scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

_MIDDLE = 8
FORMATS = ("pack-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
"""Formats of compressed-tensors that are known."""


class CompressedInt4:
    """compressed-tensors' 4-bit format; see Quantisation."""

    name = "INT4_PACK_QUANTIZED"
    method = "compressed-tensors"
    file_format = "pack-quantized"
    remedy = "download it again"
    separator, whole, n_dims = ".", ".weight", 2
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale")
    optional: tuple[str, ...] = ("weight_zero_point",)

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        values = {
            "num_bits": (4,),
            "type": ("int",),
            "strategy": ("group", "channel"),
            "actorder": (None, False, "weight", "static"),
        }
        check_compressed(settings, values, has_plain_inputs=True)

    def is_main(self, record: TensorRecord) -> bool:
        return True

    def shape(self, stored: Sequence[TensorRecord]) -> tuple[int, ...]:
        n_out, n_words = stored[0].shape
        return n_out, n_words * N_IN_WORD

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        n_out, n_in = shape
        return [("I32", (n_out, n_in // N_IN_WORD)), ("BF16", (n_out, n_in // 128))]

    def check(self, tensor: PackedTensor) -> None:
        n_out, n_in = tensor.record.shape
        n_groups = check_groups(tensor.parts[1], 1, n_in)
        expected: list[tuple[tuple[str, ...], list[int]]] = [
            (("I32",), [n_out, n_in // N_IN_WORD]),
            (SCALES, [n_out, n_groups]),
            (("I32",), [-(-n_out // N_IN_WORD), n_groups]),
        ]
        check_parts(tensor, expected[: len(tensor.parts)])

    def check_described(self, tensor: PackedTensor, settings: Mapping[str, Any]) -> None:
        groups = [group["weights"] for group in settings["config_groups"].values()]
        has_zeros = len(tensor.parts) > len(self.suffixes)
        if groups and not has_zeros and all(group.get("symmetric") is False for group in groups):
            raise ValueError("it has no weight_zero_point, and the weights are not symmetric")
        sizes = [-1 if x["strategy"] == "channel" else x.get("group_size") for x in groups]
        if sizes:
            check_group_sizes(sizes, tensor.record.shape[1], tensor.parts[1].shape[1])

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        return scratch_bytes(tensor, has_zeros=len(tensor.parts) > len(self.suffixes))

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        from backends.tiles import four_bits

        scales = tensor.parts[1]
        values = {
            four_bits.CODES: stored[0].data_ptr(),
            four_bits.SCALES: stored[1].data_ptr(),
            four_bits.SCALE_KIND: scale_kind(scales.dtype),
            four_bits.GROUP: tensor.record.shape[1] // scales.shape[1],
            four_bits.ZEROS: stored[2].data_ptr() if len(stored) > len(self.suffixes) else 0,
        }
        decoder = four_bits.decode_four_bits
        return make_table(decoder, *form(tensor), written, values, rounded=scales.dtype)

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        words, scales, *packed_zeros = typed(tensor, stored)
        n_out, n_in = tensor.record.shape
        zeros = [nibbles(some.T).flatten(1)[:, :n_out].T for some in packed_zeros]

        def decode(start: int, end: int, numbers: torch.Tensor, scratch: torch.Tensor) -> None:
            pairs = scratch[:, : n_in // 2].unflatten(1, (-1, N_IN_WORD // 2))
            numbers.copy_(nibbles(words[start:end], pairs).flatten(1))
            # q and its zero both have 8 added.
            scale(numbers, zeros[0][start:end] if zeros else _MIDDLE, scales[start:end])

        return by_pieces(n_in, decode, scales.dtype)


def check_compressed(
    settings: Mapping[str, Any], values: Mapping[str, Collection[Any]], *, has_plain_inputs: bool
) -> None:
    """Raise ValueError that names a setting of compressed-tensors which is not supported.

    values: supported values of the weights' settings.
    has_plain_inputs: inputs may not be quantised. Floats are published with a scheme for inputs,
        which are then computed as they are.
    """
    if settings.get("format") not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(f"format {shown(settings.get('format'))}, none of {known}")
    if settings.get("transform_config"):
        raise ValueError("rotations of activations ('transform_config')")
    if settings.get("kv_cache_scheme"):
        raise ValueError("a KV cache that is quantised, too ('kv_cache_scheme')")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(x, dict) for x in groups.values()):
        raise ValueError("config_groups that are no table of tables")
    for group in groups.values():
        _check_group(group, values, has_plain_inputs)


def _check_group(
    group: Mapping[str, Any], supported: Mapping[str, Collection[Any]], has_plain_inputs: bool
) -> None:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise ValueError("a group without weights")
    for key in ("input_activations", "output_activations"):
        if group.get(key) and (has_plain_inputs or key == "output_activations"):
            raise ValueError(f"activations that are quantised, too ({key!r})")
    for key, values in supported.items():
        value = weights.get(key)
        if value not in values:
            raise ValueError(f"{key} {shown(value)}, not {' or '.join(map(repr, values))}")
