"""Decoding of packed tensors on a device by torch: the same code on a CPU and on a GPU.

Errors in a twelve-bit file are detected on the device, too, and read back once per pass. Decoding
waits for the device only if control flow depends on values: in each piece of fp8, and when a gptq
matrix is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from backends.packed.by_numpy import BLOCK
from backends.packed.codec import CODECS, broken
from backends.packed.decoder import PackedModule, aligned_bytes, capacity_of
from backends.packed.tensor import TORCH_TYPES, PackedTensor
from backends.packed.twelve_bits import HEADER_BYTES, MAX_BASE, Planes, TwelveBits

_HALF = BLOCK // 2
_PIECE_WEIGHTS = 4 << 20
_SCRATCH_BYTES = 8
"""Maximum temporary bytes per weight of a piece."""
_LEFT_BY_7 = 1 << 7
_EXPONENT = 0x7F80
_SIGN_AND_MANTISSA = -0x7F81
"""Bit mask 0x807F as int16."""


class DeviceDecoder:
    """Decoder of packed tensors on a device.

    Args:
        allocate: allocates device memory, uint8 [n_bytes]; called once if there are packed tensors.
    """

    def __init__(
        self,
        modules: Iterable[PackedModule],
        allocate: Callable[[int], torch.Tensor],
    ) -> None:
        listed = [module.tensors for module in modules]
        self._tensors = [tensor for tensors in listed for tensor in tensors]
        self._numbers = {tensor.record.name: i for i, tensor in enumerate(self._tensors)}
        n_bytes = max(map(capacity_of, listed), default=0)
        self._buffer = allocate(n_bytes) if n_bytes else None
        self._first_broken: torch.Tensor | None = None

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """See Decoder; errors in twelve-bit tensors are raised later, by `check`."""
        assert self._buffer is not None, "a decoder of no modules"
        starts = accumulate(map(aligned_bytes, tensors), initial=0)
        decoded = []
        for tensor, parts, start in zip(tensors, stored, starts, strict=False):
            raw = self._buffer[start : start + tensor.decoded_bytes]
            out = raw.view(TORCH_TYPES[tensor.record.dtype]).view(tensor.record.shape)
            if tensor.record.scheme == TwelveBits.name:
                self._note(tensor, decode_twelve_bits(parts[0], out.view(-1)))
            else:
                try:
                    decode = CODECS[tensor.record.scheme].open(tensor, parts)
                    decode(0, len(out), out, _none)
                except ValueError as error:
                    raise broken(tensor.record, error) from error
            decoded.append(out)
        return decoded

    def multiply(
        self,
        tensor: PackedTensor,
        stored: Sequence[torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See Decoder; the matrix is decoded whole: a GPU's caches are too small for tiles."""
        (weight,) = self.decode([tensor], [stored])
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    def check(self) -> None:
        """Wait, and raise CheckpointError if a decoded tensor was no packed tensor."""
        if self._first_broken is None:
            return
        number, self._first_broken = int(self._first_broken), None
        if number < len(self._tensors):
            tensor = self._tensors[number]
            n_exceptions = Planes(tensor.n_weights).n_exceptions(tensor.record.n_bytes)
            why = ValueError(
                f"its base is above {MAX_BASE}, its {n_exceptions} exceptions do not ascend within "
                f"{tensor.n_weights} weights without a code, or its header says something else"
            )
            raise broken(tensor.record, why)

    def _note(self, tensor: PackedTensor, is_broken: torch.Tensor) -> None:
        number = torch.where(is_broken, self._numbers[tensor.record.name], len(self._tensors))
        before = self._first_broken
        self._first_broken = number if before is None else torch.minimum(before, number)


def decode_twelve_bits(stored: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Fill `out` (bf16 [n]) from the bytes of a tensor (docs/packed.md); return whether they are
    invalid. Writes only to `out`, whatever the bytes are.
    """
    n_weights = len(out)
    planes = Planes(n_weights)
    base, bits = stored[0], out.view(torch.int16)
    signs, codes = stored[planes.signs : planes.codes], stored[planes.codes : planes.exceptions]
    for start in range(0, n_weights, _PIECE_WEIGHTS):
        end = min(start + _PIECE_WEIGHTS, n_weights)
        pairs = codes[start // 2 : -(-end // BLOCK) * _HALF].view(-1, _HALF)
        exponents = torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1)[: end - start]
        exponents += (exponents != 0) * base
        weights = exponents.to(torch.int16).mul_(_LEFT_BY_7)
        # Widening a signed byte extends its sign to the left.
        own = signs[start:end].view(torch.int8).to(torch.int16)
        weights |= own & _SIGN_AND_MANTISSA
        bits[start:end] = weights
    unused = torch.cat((stored[1:8], stored[16:HEADER_BYTES]))
    is_broken = (base > MAX_BASE) | (unused != 0).any()
    return _put_exceptions(stored, planes, bits) | is_broken


def _put_exceptions(stored: torch.Tensor, planes: Planes, bits: torch.Tensor) -> torch.Tensor:
    """Set the exceptions; return whether their order, range or count in the header is wrong."""
    exceptions = stored[planes.exceptions :].clone().view(torch.int64)  # a clone is aligned
    n_in_header = stored[8:16].clone().view(torch.int64)[0]
    is_broken = n_in_header != len(exceptions)
    if not len(exceptions):
        return is_broken
    positions, exponents = exceptions >> 8, (exceptions & 255).to(torch.int16)
    places = positions.clamp(0, planes.n_weights - 1)
    own = bits[places]
    bits[places] = own | exponents.mul_(_LEFT_BY_7)
    is_outside = (positions != places).any() | (own & _EXPONENT).any()
    return is_broken | is_outside | (positions[1:] <= positions[:-1]).any()


def device_buffer_bytes(modules: Iterable[PackedModule]) -> tuple[int, int]:
    """Return (bytes of the buffer, temporary bytes of decoding); 0 without packed tensors."""
    listed = [module.tensors for module in modules]
    scratch = (_scratch_bytes(tensor) for tensors in listed for tensor in tensors)
    return max(map(capacity_of, listed), default=0), max(scratch, default=0)


def _scratch_bytes(tensor: PackedTensor) -> int:
    if tensor.record.scheme != TwelveBits.name:
        return CODECS[tensor.record.scheme].scratch_bytes(tensor)
    n_exceptions = Planes(tensor.n_weights).n_exceptions(tensor.record.n_bytes)
    return _SCRATCH_BYTES * (min(_PIECE_WEIGHTS, tensor.n_weights) + 6 * n_exceptions)


def _none(work: Sequence[Callable[[], None]]) -> None:
    raise AssertionError("work for threads, on a device")
