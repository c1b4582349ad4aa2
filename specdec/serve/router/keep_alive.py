"""Time that a model stays loaded without a request: Ollama's `keep_alive`, and `--keep-alive`."""

from __future__ import annotations

import math
import re
from typing import Any

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?)(ms|s|m|h)")
_DURATION = re.compile(rf"(-?)((?:{_PART.pattern})+)")
_MAX_SECONDS = 100 * 365 * 86400.0  # later times may have no date
EXAMPLES = "5m, 1h30m, a number of seconds, 0, or -1 for as long as the server runs"


def parse_keep_alive(value: Any) -> float:
    """Return seconds; infinity for a negative value and for more than 100 years. A number is in
    seconds, a text may have units as Go's durations do. Raises ValueError."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            return _limited(float(value))
        parts = _PART.findall(match[2])
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
        return _limited(-math.inf if match[1] else seconds)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is no duration")
    try:
        return _limited(float(value))
    except OverflowError as error:  # an integer of hundreds of digits
        raise ValueError("it is no duration: it has too many digits") from error


def _limited(seconds: float) -> float:
    if math.isnan(seconds):
        raise ValueError("nan is no duration")
    return seconds if 0 <= seconds <= _MAX_SECONDS else math.inf
