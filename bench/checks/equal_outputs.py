"""Texts that must be equal: where the target is exact, one that differs is an error.

A record says in its stats whether its tokens are plain decoding's to the bit (`is_exact`). Records
of other programs do not say so, nor do those of a target that is not exact: they promise nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from bench.results import RecordDict, first_mismatch
from offload.errors import SpecdecError


class OutputsDiffer(SpecdecError):
    """Decodings of an exact target did not give the same tokens."""


def are_exact(records: Iterable[RecordDict]) -> bool:
    """Whether each of them promises plain decoding's tokens; False where there are none."""
    promises = [bool(record.get("stats", {}).get("is_exact")) for record in records]
    return bool(promises) and all(promises)


def check_equal_outputs(records: Iterable[RecordDict]) -> None:
    """Compare what exact decodings made of each prompt, as far as they go; a slow one goes less
    far, but sequences that ended must be equally long.

    Raises TextsDiffer with the first prompt and position.
    """
    first: dict[str, RecordDict] = {}
    for record in records:
        if are_exact([record]):
            requested = first.setdefault(record["prompt"], record)
            at = _first_difference(requested, record)
            if at is not None:
                raise OutputsDiffer(
                    f"two sequences of {record['prompt']} differ from token {at} on, although the "
                    "target is exact: this should not happen, please report it"
                )


def percent_equal(token_match: float | None) -> str:
    """Of tokens. 100 % are all of them: less is rounded down."""
    if token_match is None:
        return "-"
    return "100 %" if token_match == 1 else f"{math.floor(1000 * token_match) / 10:.1f} %"


def _first_difference(left: RecordDict, right: RecordDict) -> int | None:
    tokens, rest = left["token_ids"], right["token_ids"]
    if not (left.get("finish_reason") and right.get("finish_reason")):
        n = min(len(tokens), len(rest))
        tokens, rest = tokens[:n], rest[:n]
    return first_mismatch(tokens, rest)
