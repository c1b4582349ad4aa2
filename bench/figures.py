"""From records to figures. Pure functions: the tests feed them by hand.

Totals, not means of rates: tokens per second is all decode tokens over all decode seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from specdec.decoding.stats import AVERAGED, BY_DEPTH, LARGEST, SUMMED, TRUE_FOR_ALL, ratio

LOSSY = "LOSSY (--accept-threshold)"

Record = Mapping[str, Any]
"""A `bench.decode.measure.Record` as a dictionary."""


def of_mode(records: Sequence[Record], mode: str) -> list[Record]:
    return [record for record in records if record["mode"] == mode]


def aggregate_stats(records: Sequence[Record]) -> dict[str, Any]:
    """The stats of several generations as one, with the keys of a single one."""
    stats = [record["stats"] for record in records]
    total: dict[str, Any] = {key: sum(one[key] for one in stats) for key in SUMMED}
    total |= {key: max((one[key] for one in stats), default=0) for key in LARGEST}
    total |= {key: ratio(sum(one[key] for one in stats), len(stats)) for key in AVERAGED}
    total |= {key: all(one[key] for one in stats) for key in TRUE_FOR_ALL}
    total |= {key: list(sum_by_depth(one[key] for one in stats)) for key in BY_DEPTH}
    n_decoded = sum(max(one["generated_tokens"] - 1, 0) for one in stats)
    n_scored = total["drafted_tokens"] + total["passes"]
    most_flops = total["decode_seconds"] * total["peak_flops_per_second"]
    n_rejected = total["drafted_tokens"] - total["accepted_tokens"]
    return {
        "tokens_per_second": ratio(n_decoded, total["decode_seconds"]),
        "time_per_output_token": ratio(total["decode_seconds"], n_decoded),
        "mean_acceptance_length": 1.0 + ratio(total["accepted_tokens"], total["passes"]),
        "acceptance_rate": ratio(total["accepted_tokens"], total["drafted_tokens"]),
        "flops_rejected_fraction": ratio(n_rejected, n_scored),
        "model_flops_utilization": ratio(total["model_flops"], most_flops),
        "pass_slowdown": ratio(total["slowed_pass_seconds"], total["unslowed_pass_seconds"]),
        "ngram_share": ratio(total["ngram_hits"], total["accepted_tokens"]),
        **total,
    }


def lossy_mark(figures: Mapping[str, Any]) -> str:
    """What is written behind figures of text that is not the target's own; else nothing.

    Results of versions that had no such option do not say.
    """
    return "" if figures.get("is_lossless", True) else f"  {LOSSY}"


def sum_by_depth(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Element by element; a shorter one goes on with zeros."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def roofline_fraction(records: Sequence[Record], bytes_per_pass: int) -> float | None:
    """Shortest time that the storage allows / decode time taken, over all records.

    The shortest time is the bytes that the decode passes stream, at the raw bandwidth that was
    probed around each record. None where nothing is streamed.
    """
    if bytes_per_pass <= 0:
        return None
    shortest = sum(
        record["stats"]["passes"] * bytes_per_pass / record["storage_bytes_per_second"]
        for record in records
        if record["stats"]["passes"]
    )
    return ratio(shortest, sum(record["stats"]["decode_seconds"] for record in records))


def first_mismatch(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None when equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_tokens(plain: Sequence[Record], speculative: Sequence[Record]) -> dict[str, Any]:
    """How far the two decodings agree, prompt by prompt.

    `token_match` is the share of plain's tokens that come before a first mismatch: 1.0 means that
    every token of every prompt is equal.
    """
    others = {record["prompt"]: record["token_ids"] for record in speculative}
    mismatches: dict[str, int] = {}
    n_equal = n_tokens = 0
    for record in plain:
        tokens = record["token_ids"]
        at = first_mismatch(tokens, others[record["prompt"]])
        n_tokens += len(tokens)
        n_equal += len(tokens) if at is None else at
        if at is not None:
            mismatches[record["prompt"]] = at
    return {
        "token_match": _share(n_equal, n_tokens),
        "prompts_equal": len(plain) - len(mismatches),
        "first_mismatches": mismatches,
    }


def mean_bandwidth(records: Sequence[Record]) -> float:
    values = [record["storage_bytes_per_second"] for record in records]
    return ratio(sum(values), len(values))


def _share(n_equal: int, n_tokens: int) -> float:
    """Of no tokens at all, all are equal."""
    return ratio(n_equal, n_tokens) if n_tokens else 1.0
