"""bf16 in about 12 bits, bit for bit: the format is specified in docs/packed.md.

Sign and mantissa (8 bits) are stored unchanged. The exponents of trained weights have few values:
15 consecutive ones, and 0, have a code of 4 bits; any other is in a list of exceptions.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from backends.packed.by_numpy import BLOCK
from backends.packed.kernels import fastest_kernels
from backends.packed.tensor import DecodeRows, PackedTensor, form
from backends.tiles.stored import Table, make_table

HEADER_BYTES = 64
EXCEPTION_BYTES = 8
N_CODES = 15
"""Number of consecutive exponents that have a code, in addition to 0."""
MAX_BASE = 255 - N_CODES
MAX_EXCEPTIONS = 0.01
"""Maximum share of exceptions among the weights of a packed tensor."""
_EXCEPTION_SCRATCH_BYTES = 40
"""Maximum temporary bytes per exception while they are checked."""
DecodePiece = Callable[[int, int, np.ndarray], None]
"""(start, end, out): fills out (uint8) with the bytes of these weights."""
_HEADER = struct.Struct("<B7xQ48x")
_EXPONENT = np.uint16(0x7F80)
_SAMPLE = 1 << 20


@dataclass(frozen=True)
class Planes:
    """Offsets of the parts of a tensor of `n_weights` in its bytes."""

    n_weights: int

    @property
    def n_padded(self) -> int:
        return -(-self.n_weights // BLOCK) * BLOCK

    @property
    def signs(self) -> int:
        return HEADER_BYTES

    @property
    def codes(self) -> int:
        return HEADER_BYTES + self.n_padded

    @property
    def exceptions(self) -> int:
        """Offset of the exceptions: the end of a tensor without any."""
        return self.codes + self.n_padded // 2

    @property
    def max_exceptions(self) -> int:
        return int(MAX_EXCEPTIONS * self.n_weights)

    def n_bytes(self, n_exceptions: int) -> int:
        return self.exceptions + n_exceptions * EXCEPTION_BYTES

    def n_exceptions(self, n_bytes: int) -> int:
        """Return the number of exceptions in a tensor of `n_bytes`."""
        return (n_bytes - self.exceptions) // EXCEPTION_BYTES


class TwelveBits:
    """Lossless bf16 in about 12 bits; see Codec."""

    name = "BF16_12"
    number_format = "BF16"
    itemsize = 2
    piece_weights = 1024 * BLOCK
    """Weights that are decoded at a time: a few hundred microseconds."""
    remedy = "pack the model again"

    def __init__(self, kernels: ModuleType | None = None) -> None:
        """kernels: by_numba or by_numpy; None: the fastest available."""
        self._kernels = kernels

    @property
    def kernels(self) -> ModuleType:
        if self._kernels is None:
            self._kernels = fastest_kernels()
        return self._kernels

    def min_bytes(self, n_weights: int) -> int:
        """Return the packed size of `n_weights` without exceptions."""
        return Planes(n_weights).exceptions

    def check_size(self, n_weights: int, n_bytes: int) -> None:
        planes = Planes(n_weights)
        n_exceptions = planes.n_exceptions(n_bytes)
        is_whole = planes.n_bytes(n_exceptions) == n_bytes
        if not is_whole or not 0 <= n_exceptions <= planes.max_exceptions:
            raise ValueError(
                f"{n_weights} weights take {planes.exceptions} bytes and {EXCEPTION_BYTES} for "
                f"each of at most {planes.max_exceptions} exceptions, not {n_bytes}"
            )

    def check(self, tensor: PackedTensor) -> None:
        if tensor.record.dtype != self.number_format:
            raise ValueError(f"it holds {self.number_format}, not {tensor.record.dtype}")
        self.check_size(tensor.n_weights, tensor.record.n_bytes)

    def table(self, tensor: PackedTensor, stored: Sequence[torch.Tensor], written: int) -> Table:
        from backends.tiles import twelve_bits

        planes, bytes_of = Planes(tensor.n_weights), stored[0].numpy()
        base, positions, exponents = _checked_parts(bytes_of, planes)
        values = {
            twelve_bits.SIGNS: stored[0].data_ptr() + planes.signs,
            twelve_bits.CODES: stored[0].data_ptr() + planes.codes,
            twelve_bits.BASE: base,
            twelve_bits.POSITIONS: positions.ctypes.data,
            twelve_bits.EXPONENTS: exponents.ctypes.data,
            twelve_bits.N_EXCEPTIONS: len(positions),
        }
        decoder, retained = twelve_bits.decode_twelve_bits, (positions, exponents)
        return make_table(decoder, *form(tensor), written, values, retained=retained)

    def open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        raise NotImplementedError("backends/packed/device.py decodes this scheme in its own code")

    def scratch_bytes(self, tensor: PackedTensor) -> int:
        n_exceptions = Planes(tensor.n_weights).n_exceptions(tensor.record.n_bytes)
        return _EXCEPTION_SCRATCH_BYTES * n_exceptions

    def example(self, shape: tuple[int, int]) -> list[tuple[str, tuple[int, ...]]]:
        return [("U8", (self.min_bytes(math.prod(shape)),))]

    def opened(self, stored: np.ndarray, n_weights: int) -> DecodePiece:
        """Return a function that decodes a part of a tensor stored as these bytes (uint8).

        Its `start` must be the start of a block. It is thread-safe.

        Raises ValueError with a reason for bytes that are no tensor of this scheme.
        """
        planes = Planes(n_weights)
        base, positions, exponents = _checked_parts(stored, planes)
        signs = stored[planes.signs : planes.codes]
        codes = stored[planes.codes : planes.exceptions]

        def decode(start: int, end: int, out: np.ndarray) -> None:
            weights = out.view(np.uint16)
            end_of_codes = -(-end // BLOCK) * BLOCK // 2
            self.kernels.decode(signs[start:end], codes[start // 2 : end_of_codes], base, weights)
            first, last = np.searchsorted(positions, (start, end))
            places = positions[first:last] - start
            own = weights[places]
            if np.any(own & _EXPONENT):
                raise ValueError("an exception has a code, too")
            weights[places] = own | exponents[first:last] << np.uint16(7)

        return decode

    def encode(self, weights: np.ndarray, base: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (signs, codes, exceptions) of a piece of uint16 weights that starts at a block;
        exceptions as stored, with positions relative to the piece."""
        n_padded = Planes(len(weights)).n_padded
        signs, codes = np.zeros(n_padded, np.uint8), np.zeros(n_padded // 2, np.uint8)
        positions = self.kernels.encode(weights, base, signs, codes)
        exponents = weights[positions] >> np.uint16(7) & np.uint16(255)
        return signs, codes, positions.astype(np.uint64) << np.uint64(8) | exponents


def header(base: int, n_exceptions: int) -> bytes:
    return _HEADER.pack(base, n_exceptions)


def choose_base(weights: np.ndarray) -> int:
    """Choose the base for which base + 1 .. base + N_CODES cover most exponents of a sample."""
    step = max(1, len(weights) // _SAMPLE) | 1  # odd: matrices have even numbers of columns
    exponents = weights[::step] >> np.uint16(7) & np.uint16(255)
    counts = np.bincount(exponents, minlength=256)
    covered = np.convolve(counts[1:], np.ones(N_CODES, np.int64), mode="valid")
    return int(np.argmax(covered))


def _checked_parts(stored: np.ndarray, planes: Planes) -> tuple[int, np.ndarray, np.ndarray]:
    """Return (base, positions of exceptions, their exponents). Raises ValueError."""
    if len(stored) < planes.exceptions:
        raise ValueError(f"{len(stored)} bytes end before {planes.exceptions}, where planes do")
    base, n_exceptions = _HEADER.unpack(stored[:HEADER_BYTES].tobytes())
    if base > MAX_BASE:
        raise ValueError(f"its base is {base}, at most {MAX_BASE} leaves room for all codes")
    if stored[1:8].any() or stored[16:HEADER_BYTES].any():
        raise ValueError("bytes of its header are not 0 that mean nothing")
    if planes.n_bytes(n_exceptions) != len(stored):
        raise ValueError(
            f"with {n_exceptions} exceptions it has {planes.n_bytes(n_exceptions)} bytes, "
            f"not {len(stored)}"
        )
    exceptions = np.frombuffer(stored[planes.exceptions :].tobytes(), "<u8")
    positions = exceptions >> np.uint64(8)
    if n_exceptions and int(positions[-1]) >= planes.n_weights:
        raise ValueError(f"an exception is weight {positions[-1]} of {planes.n_weights}")
    if np.any(positions[1:] <= positions[:-1]):
        raise ValueError("its exceptions do not ascend")
    return base, positions.astype(np.int64), (exceptions & np.uint64(255)).astype(np.uint16)
