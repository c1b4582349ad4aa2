"""From a program's journal to its figures. Pure functions: the tests feed them by hand.

Totals, not means of rates: tokens per second is all tokens after the first arrival over all seconds
after it, as for our own figures. Tokens that came together are charged an equal share of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from bench.figures import first_mismatch, sum_by_depth
from specdec.decoding.stats import BY_DEPTH, percentile, ratio

Record = Mapping[str, Any]
"""A `prompt` line of a journal (bench.peers.program)."""


def summarise(records: Sequence[Record], *, speculates: bool = False) -> dict[str, Any]:
    """The figures of all prompts together; rates are None where nothing was decoded.

    tokens_per_second, time_to_first_token (mean, seconds), seconds_per_token_median and _p90,
    bytes_read_per_token (after the first arrival), mean_acceptance_length (tokens per pass; None
    for a program that does not speculate), n_prompts, n_tokens (all of them, the first included).
    """
    first = [record["arrivals"][0][0] for record in records]
    token_seconds = [s for record in records for s in seconds_of_tokens(record)]
    n_decoded = len(token_seconds)
    n_passes = sum(len(record["arrivals"]) - 1 for record in records)
    return {
        "tokens_per_second": ratio(n_decoded, sum(token_seconds)) if n_decoded else None,
        "time_to_first_token": ratio(sum(first), len(first)) if first else None,
        "seconds_per_token_median": percentile(token_seconds, 0.5) if n_decoded else None,
        "seconds_per_token_p90": percentile(token_seconds, 0.9) if n_decoded else None,
        "bytes_read_per_token": _bytes_per_token(records),
        "mean_acceptance_length": ratio(n_decoded, n_passes) if speculates and n_passes else None,
        "n_prompts": len(records),
        "n_tokens": sum(n for record in records for _, n in record["arrivals"]),
        "acceptance_by_depth": acceptance_by_depth(record.get("stats") for record in records),
    }


def seconds_of_tokens(record: Record) -> list[float]:
    """Of every token after the first arrival."""
    return [
        (now - before) / n
        for (before, _), (now, n) in pairwise(record["arrivals"])
        for _ in range(n)
    ]


def by_category(records: Sequence[Record], *, speculates: bool = False) -> dict[str, Any]:
    """`summarise` for every category; empty where the prompts have none."""
    names = sorted({record["category"] for record in records} - {""})
    return {
        name: summarise([r for r in records if r["category"] == name], speculates=speculates)
        for name in names
    }


def acceptance_by_depth(stats: Iterable[Mapping[str, Any] | None]) -> list[dict[str, int]] | None:
    """For depth 1, 2, ...: rounds that came to have a guess there, and those where it was right.

    None where no record holds it.
    """
    known = [one for one in stats if one and one.get("tried_by_depth")]
    tried, accepted = (sum_by_depth(one[name] for one in known) for name in BY_DEPTH)
    counts = [{"tried": t, "accepted": a} for t, a in zip(tried, accepted, strict=True)]
    return counts or None


def pairwise_ratios(runs: Mapping[str, Sequence[Record]]) -> dict[str, dict[str, Any]]:
    """name -> other -> {ratio, n_prompts, n_tokens}: speed over speed, on the tokens of both.

    A slow program measures fewer prompts and fewer tokens of each; comparing it with another's mean
    over all of them would compare texts, not programs. So both are cut to the shorter, prompt by
    prompt: to the same positions of the text, `n_tokens` in all. Pairs without any are left out.
    """
    ratios: dict[str, dict[str, Any]] = {}
    for name, records in runs.items():
        ratios[name] = {}
        for other, others in runs.items():
            pairs = list(_same_tokens(records, others)) if name != other else []
            seconds = [sum(sum(pair[i]) for pair in pairs) for i in (0, 1)]
            if all(seconds):
                ratios[name][other] = {
                    "ratio": ratio(seconds[1], seconds[0]),
                    "n_prompts": len(pairs),
                    "n_tokens": sum(len(own) for own, _ in pairs),
                }
    return ratios


def describe_ratio(found: Mapping[str, Any]) -> str:
    """What a ratio is over; results of earlier versions do not know the tokens."""
    text = count_of(found["n_prompts"], "prompt")
    return f"{text}, {count_of(found['n_tokens'], 'token')}" if "n_tokens" in found else text


def count_of(n: int, thing: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def token_match(records: Sequence[Record], reference: Sequence[Record]) -> float | None:
    """Share of tokens before the first one that differs from the reference; None if none is shared.

    A check of the set-up: greedy texts of the same weights are equal but for near ties.
    """
    wanted = {record["prompt"]: record["token_ids"] for record in reference}
    n_tokens = n_equal = 0
    for record in records:
        if record["prompt"] in wanted:
            n = min(len(record["token_ids"]), len(wanted[record["prompt"]]))
            tokens = record["token_ids"][:n]
            at = first_mismatch(tokens, wanted[record["prompt"]][:n])
            n_tokens += n
            n_equal += n if at is None else at
    return n_equal / n_tokens if n_tokens else None


def _bytes_per_token(records: Sequence[Record]) -> float | None:
    known = [record for record in records if record["bytes_read"] is not None]
    n_bytes = sum(record["bytes_read"][-1] - record["bytes_read"][1] for record in known)
    n_tokens = sum(len(seconds_of_tokens(record)) for record in known)
    return n_bytes / n_tokens if n_tokens else None


def _same_tokens(
    records: Sequence[Record], others: Sequence[Record]
) -> Iterator[tuple[list[float], list[float]]]:
    """Seconds of the same tokens in both, for every prompt that has some."""
    theirs = {record["prompt"]: seconds_by_position(record) for record in others}
    for record in records:
        own, other = seconds_by_position(record), theirs.get(record["prompt"], {})
        shared = own.keys() & other.keys()
        if shared:
            yield [own[at] for at in shared], [other[at] for at in shared]


def seconds_by_position(record: Record) -> dict[int, float]:
    """Position in the generated text -> seconds, of every token after the first arrival."""
    first = record["arrivals"][0][1] if record["arrivals"] else 0
    return dict(enumerate(seconds_of_tokens(record), start=first))
