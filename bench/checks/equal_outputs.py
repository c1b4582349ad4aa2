"""Check that outputs of an exact target are equal.

A record says in its stats whether its tokens are plain decoding's to the bit (`is_exact`). Records
of other programs, and of a target that is not exact, do not promise that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bench.results import RecordDict, first_mismatch
from offload.errors import SpecdecError


class OutputsDiffer(SpecdecError):
    """Decodings of an exact target did not give the same tokens."""


def are_exact(records: Iterable[RecordDict]) -> bool:
    """Return whether every record promises plain decoding's tokens; False if there is none."""
    promises = [bool(record.get("stats", {}).get("is_exact")) for record in records]
    return bool(promises) and all(promises)


def check_equal_outputs(records: Iterable[RecordDict]) -> None:
    """Compare the exact outputs of each prompt over their common length; finished ones must be
    equally long.

    Raises OutputsDiffer with the first prompt and position.
    """
    first: dict[str, RecordDict] = {}
    for record in records:
        if are_exact([record]):
            reference = first.setdefault(record["prompt"], record)
            at = _first_difference(reference, record)
            if at is not None:
                raise OutputsDiffer(
                    f"two outputs for {record['prompt']} differ from token {at} on, although the "
                    "target is exact: this should not happen, please report it"
                )


def percent_equal(token_match: float | None) -> str:
    """Return the share of equal tokens; rounded down, so that 100 % means all of them."""
    if token_match is None:
        return "-"
    return "100 %" if token_match == 1 else f"{math.floor(1000 * token_match) / 10:.1f} %"


def _first_difference(left: RecordDict, right: RecordDict) -> int | None:
    left_ids, right_ids = left["token_ids"], right["token_ids"]
    if not (left.get("finish_reason") and right.get("finish_reason")):
        n = min(len(left_ids), len(right_ids))
        left_ids, right_ids = left_ids[:n], right_ids[:n]
    return first_mismatch(left_ids, right_ids)
