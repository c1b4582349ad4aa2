"""From records to figures. Pure functions: the tests feed them by hand.

Totals, not means of rates: tokens per second is all tokens after the first arrival over all seconds
after it. Tokens that came together are charged an equal share of the time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from specdec.metrics.stats import (
    AVERAGED,
    BY_DEPTH,
    LARGEST,
    SUMMED,
    TRUE_FOR_ALL,
    MeasuredPass,
    percentile,
    ratio,
)

LOSSY = "LOSSY (--accept-threshold)"

RecordDict = Mapping[str, Any]
"""A `bench.process.results.Record` as a dictionary."""


def of_mode(records: Sequence[RecordDict], mode: str) -> list[RecordDict]:
    return [record for record in records if record["mode"] == mode]


def aggregate_stats(records: Sequence[RecordDict]) -> dict[str, Any]:
    """The stats of several generations as one, with the keys of a single one."""
    stats = [record["stats"] for record in records]
    total: dict[str, Any] = {key: sum(stat[key] for stat in stats) for key in SUMMED}
    total |= {key: max((stat[key] for stat in stats), default=0) for key in LARGEST}
    total |= {key: ratio(sum(stat[key] for stat in stats), len(stats)) for key in AVERAGED}
    total |= {key: all(stat[key] for stat in stats) for key in TRUE_FOR_ALL}
    total |= {key: list(sum_by_depth(stat[key] for stat in stats)) for key in BY_DEPTH}
    n_decoded = sum(max(stat["generated_tokens"] - 1, 0) for stat in stats)
    n_scored = total["drafted_tokens"] + total["passes"]
    max_flops = total["decode_seconds"] * total["peak_flops_per_second"]
    n_rejected = total["drafted_tokens"] - total["accepted_tokens"]
    return {
        "tokens_per_second": ratio(n_decoded, total["decode_seconds"]),
        "time_per_output_token": ratio(total["decode_seconds"], n_decoded),
        "mean_acceptance_length": 1.0 + ratio(total["accepted_tokens"], total["passes"]),
        "acceptance_rate": ratio(total["accepted_tokens"], total["drafted_tokens"]),
        "flops_rejected_fraction": ratio(n_rejected, n_scored),
        "model_flops_utilization": ratio(total["model_flops"], max_flops),
        "pass_slowdown": ratio(total["slowed_pass_seconds"], total["unslowed_pass_seconds"]),
        "expert_hit_rate": ratio(total["experts_found"], total["experts_asked"]),
        "ngram_share": ratio(total["ngram_hits"], total["accepted_tokens"]),
        **total,
    }


def lossy_mark(results: Mapping[str, Any]) -> str:
    """What is written behind figures of text that is not the target's own; else nothing.

    Results of versions that had no such option do not say.
    """
    return "" if results.get("is_lossless", True) else f"  {LOSSY}"


def sum_by_depth(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Element by element; a shorter one goes on with zeros."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def roofline_fraction(records: Sequence[RecordDict], bytes_per_pass: int) -> float | None:
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


def compare_tokens(
    records: Sequence[RecordDict], reference: Sequence[RecordDict]
) -> dict[str, Any]:
    """How far decodings agree with those of a reference, prompt by prompt.

    `token_match` is the share of tokens that come before a first mismatch, as far as both sequences go
    (a slow program does fewer): 1.0 means that all of them are equal, None that none is shared.
    """
    requested = {record["prompt"]: record["token_ids"] for record in reference}
    mismatches: dict[str, int] = {}
    n_shared = n_equal = n_tokens = 0
    for record in records:
        name, tokens = record["prompt"], record["token_ids"]
        if name in requested:
            n = min(len(tokens), len(requested[name]))
            at = first_mismatch(tokens, requested[name])
            n_shared += 1
            n_tokens += n
            n_equal += n if at is None else min(at, n)
            if at is not None:
                mismatches[name] = at
    return {
        "token_match": n_equal / n_tokens if n_tokens else None,
        "prompts_equal": n_shared - len(mismatches),
        "first_mismatches": mismatches,
    }


def mean_bandwidth(records: Sequence[RecordDict]) -> float:
    values = [record["storage_bytes_per_second"] for record in records]
    return ratio(sum(values), len(values))


# --- what was seen from outside, of any program ---------------------------------------------------


def summarise(records: Sequence[RecordDict], *, speculates: bool = False) -> dict[str, Any]:
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


def seconds_of_tokens(record: RecordDict) -> list[float]:
    """Of every token after the first arrival."""
    return [
        (now - before) / n
        for (before, _), (now, n) in pairwise(record["arrivals"])
        for _ in range(n)
    ]


def by_category(records: Sequence[RecordDict], *, speculates: bool = False) -> dict[str, Any]:
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
    known = [stat for stat in stats if stat and stat.get("tried_by_depth")]
    tried, accepted = (sum_by_depth(item[name] for item in known) for name in BY_DEPTH)
    counts = [{"tried": t, "accepted": a} for t, a in zip(tried, accepted, strict=True)]
    return counts or None


def pairwise_ratios(runs: Mapping[str, Sequence[RecordDict]]) -> dict[str, dict[str, Any]]:
    """name -> other -> {ratio, n_prompts, n_tokens}: speed over speed, on the tokens of both.

    A slow program measures fewer prompts and fewer tokens of each; comparing it with another's mean
    over all of them would compare sequences, not programs. So both are cut to the shorter, prompt by
    prompt: to the same positions of the text, `n_tokens` in all. Pairs without any are left out.
    """
    ratios: dict[str, dict[str, Any]] = {}
    for name, records in runs.items():
        ratios[name] = {}
        for other, rest in runs.items():
            pairs = list(_same_tokens(records, rest)) if name != other else []
            seconds = [sum(sum(pair[i]) for pair in pairs) for i in (0, 1)]
            if all(seconds):
                ratios[name][other] = {
                    "ratio": ratio(seconds[1], seconds[0]),
                    "n_prompts": len(pairs),
                    "n_tokens": sum(len(own) for own, _ in pairs),
                }
    return ratios


def describe_ratio(result: Mapping[str, Any]) -> str:
    """What a ratio is over; results of earlier versions do not know the tokens."""
    text = count_of(result["n_prompts"], "prompt")
    return f"{text}, {count_of(result['n_tokens'], 'token')}" if "n_tokens" in result else text


def count_of(n: int, thing: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _bytes_per_token(records: Sequence[RecordDict]) -> float | None:
    known = [record for record in records if record["bytes_read"] is not None]
    n_bytes = sum(record["bytes_read"][-1] - record["bytes_read"][1] for record in known)
    n_tokens = sum(len(seconds_of_tokens(record)) for record in known)
    return n_bytes / n_tokens if n_tokens else None


def _same_tokens(
    records: Sequence[RecordDict], rest: Sequence[RecordDict]
) -> Iterator[tuple[list[float], list[float]]]:
    """Seconds of the same tokens in both, for every prompt that has some."""
    theirs = {record["prompt"]: seconds_by_position(record) for record in rest}
    for record in records:
        own, other = seconds_by_position(record), theirs.get(record["prompt"], {})
        shared = own.keys() & other.keys()
        if shared:
            yield [own[at] for at in shared], [other[at] for at in shared]


def seconds_by_position(record: RecordDict) -> dict[int, float]:
    """Position in the generated text -> seconds, of every token after the first arrival."""
    first = record["arrivals"][0][1] if record["arrivals"] else 0
    return dict(enumerate(seconds_of_tokens(record), start=first))


# --- how much of what speculation promises arrives ------------------------------------------------
#
# A pass of N rows that emits L tokens, in the place of L passes of one row, promises a speedup of
# L * T(1) / T(N). What drafting, acceptance and the rest of the loop take is missing to it.


def pass_times_of(records: Iterable[Mapping[str, Any]]) -> list[MeasuredPass]:
    """Of all passes of `bench.process.results.Record`s, also of those read from JSON."""
    return [
        MeasuredPass(int(item[0]), float(item[1]), bool(item[2]))
        for record in records
        for item in record["pass_times"]
    ]


def median_pass_seconds(times: Iterable[MeasuredPass], num_tokens: int) -> float | None:
    """Return that of passes with exactly so many tokens; None without any."""
    seconds = [time.seconds for time in times if time.num_tokens == num_tokens]
    return median(seconds) if seconds else None


def typical_pass_seconds(times: Iterable[MeasuredPass]) -> float | None:
    """Of passes of several sizes: the mean of the medians of each size, weighted by its passes.

    A stray slow pass does not count, where there are others of its size. None without any pass.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for time in times:
        by_size[time.num_tokens].append(time.seconds)
    n_passes = sum(map(len, by_size.values()))
    if not n_passes:
        return None
    return sum(len(seconds) * median(seconds) for seconds in by_size.values()) / n_passes


def efficiency(
    speedup: float, tokens_per_pass: float, seconds_1: float | None, seconds_n: float | None
) -> float | None:
    """speedup / (tokens per pass · T(1) / T(N)); None where a time is not known."""
    if not seconds_1 or not seconds_n:
        return None
    return ratio(speedup, tokens_per_pass * seconds_1 / seconds_n)
