"""Byte counts: parsed from and formatted as text, and as progress.

`GB` (10^9) and `GiB` (2^30) are different units and both are accepted. A bare `K`, `M`, `G` or `T`
is binary, as it is in cgroup files, `dd` and `systemd`. Case does not matter. A text must have a
unit: a user who writes 3.5 does not mean 4 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal

from offload.errors import SpecdecError

KIB = 2**10
MIB = 2**20
GIB = 2**30

Progress = Callable[[int, int], None]
"""(bytes done, bytes in total)"""

_UNITS: dict[str, int] = {"b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):
    _UNITS[_prefix] = 1024**_power
    _UNITS[f"{_prefix}ib"] = 1024**_power
    _UNITS[f"{_prefix}b"] = 1000**_power

# The length is bounded because the text may come from a file or the command line: int() and
# Decimal() are quadratic in the number of digits.
_PATTERN = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{0,20})?|\.[0-9]{1,20})\s*([a-zA-Z]{0,3})\s*")
_MAX_BYTES = 2**63 - 1


class UnitError(SpecdecError, ValueError):
    """The text is not a byte count."""


def parse_bytes(text: str | int) -> int:
    """Parse "3.5GiB", "6GB", "512 MiB", "4G" or "4096B" into bytes (rounded to nearest).

    An int is bytes.

    Raises:
        UnitError: the text is no number with a known unit, is negative, or exceeds 2^63 - 1.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise UnitError(f"{text!r} is not a byte count; write for example 3.5GiB or 6GB")
    if isinstance(text, int):
        return _check_range(text, text)
    match = _PATTERN.fullmatch(text)
    if match is not None and not match.group(2):
        raise UnitError(f"{text!r} has no unit; write for example 3.5GiB, 6GB or 4096B")
    scale = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        raise UnitError(f"{text!r} is not a byte count; write for example 3.5GiB, 6GB or 512MB")
    n_bytes = (Decimal(match.group(1)) * scale).to_integral_value(rounding=ROUND_HALF_UP)
    return _check_range(int(n_bytes), text)


def format_bytes(n_bytes: int) -> str:
    """Render bytes in binary units with two decimals: 3758096384 -> "3.50 GiB"."""
    if n_bytes < 0:
        return "-" + format_bytes(-n_bytes)
    if n_bytes < KIB:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        # 1023.996 MiB would print as "1024.00 MiB": move on to the next unit instead.
        if value < 1023.995:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} PiB"


def format_down(n_bytes: int) -> str:
    """Format a limit, rounded down so that it is not exceeded when typed in: "24105 MiB (23.54
    GiB)"."""
    text = f"{n_bytes // MIB} MiB"
    return f"{text} ({format_bytes(n_bytes)})" if n_bytes >= GIB else text


def _check_range(n_bytes: int, text: str | int) -> int:
    if not 0 <= n_bytes <= _MAX_BYTES:
        raise UnitError(f"{text!r} is out of range; a byte count lies between 0 and 2^63 - 1")
    return n_bytes
