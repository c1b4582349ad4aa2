"""What a measurement of this machine's arithmetic says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeProfile:
    """Seconds that a pass spends on each byte of weights."""

    seconds_per_byte: float
    seconds_per_byte_row: float
