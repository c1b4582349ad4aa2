"""Results from records. Pure functions.

Totals, not means of rates: tokens per second is all tokens after the first arrival over all seconds
after it. Tokens that arrived together share the time equally.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from statistics import median
from typing import Any

from specdec.metrics.renamed import with_old_names
from specdec.metrics.stats import (
    AVERAGED,
    BY_DEPTH,
    LARGEST,
    SAME_FOR_ALL,
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
    """Return the stats of several generations as one, with the keys of a single one."""
    stats = [record["stats"] for record in records]
    total: dict[str, Any] = {key: sum(stat[key] for stat in stats) for key in SUMMED}
    total |= {key: max((stat[key] for stat in stats), default=0) for key in LARGEST}
    total |= {key: ratio(sum(stat[key] for stat in stats), len(stats)) for key in AVERAGED}
    total |= {key: all(stat[key] for stat in stats) for key in TRUE_FOR_ALL}
    total |= {key: _common(stat.get(key, "") for stat in stats) for key in SAME_FOR_ALL}
    total |= {key: list(sum_by_depth(stat[key] for stat in stats)) for key in BY_DEPTH}
    n_decoded = sum(max(stat["generated_tokens"] - 1, 0) for stat in stats)
    n_scored = total["drafted_tokens"] + total["passes"]
    max_flops = total["decode_seconds"] * total["peak_flops_per_second"]
    n_rejected = total["drafted_tokens"] - total["accepted_tokens"]
    rates = {
        "tokens_per_second": ratio(n_decoded, total["decode_seconds"]),
        "time_per_output_token": ratio(total["decode_seconds"], n_decoded),
        "mean_acceptance_length": 1.0 + ratio(total["accepted_tokens"], total["passes"]),
        "acceptance_rate": ratio(total["accepted_tokens"], total["drafted_tokens"]),
        "flops_rejected_fraction": ratio(n_rejected, n_scored),
        "model_flops_utilization": ratio(total["model_flops"], max_flops),
        "pass_slowdown": ratio(total["slowed_pass_seconds"], total["unslowed_pass_seconds"]),
        "expert_hit_rate": ratio(total["experts_found"], total["experts_asked"]),
        "ngram_share": ratio(total["ngram_hits"], total["accepted_tokens"]),
    }
    return with_old_names({**rates, **total})


def _common(values: Iterable[str]) -> str:
    """Return the value that all have in common, else ""."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else ""


def lossy_mark(results: Mapping[str, Any]) -> str:
    """Return the mark of results of lossy decoding, or "".

    Results of older versions, which had no such option, are lossless.
    """
    return "" if results.get("is_lossless", True) else f"  {LOSSY}"


def sum_by_depth(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return sums element by element; shorter ones are padded with zeros."""
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def roofline_fraction(records: Sequence[RecordDict], bytes_per_pass: int) -> float | None:
    """Return the shortest time that the storage allows / decode time taken, over all records.

    The shortest time is that of the bytes that the decode passes stream, at the raw bandwidth
    probed around each record. None if nothing is streamed.
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
    """Return the index of the first token that differs or is missing; None if equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_tokens(
    records: Sequence[RecordDict], reference: Sequence[RecordDict]
) -> dict[str, Any]:
    """Compare outputs with those of a reference, prompt by prompt.

    `token_match` is the share of tokens before a first mismatch, over the common length (a slow
    program decodes fewer): 1.0 means that all of them are equal, None that none is shared.
    """
    expected = {record["prompt"]: record["token_ids"] for record in reference}
    mismatches: dict[str, int] = {}
    n_shared = n_equal = n_tokens = 0
    for record in records:
        name, tokens = record["prompt"], record["token_ids"]
        if name in expected:
            n = min(len(tokens), len(expected[name]))
            at = first_mismatch(tokens, expected[name])
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


# --- timings of any program -----------------------------------------------------------------------


def summarise(records: Sequence[RecordDict], *, speculates: bool = False) -> dict[str, Any]:
    """Return the results of all prompts together; rates are None if nothing was decoded.

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
    """Return the seconds of every token after the first arrival."""
    return [
        (now - before) / n
        for (before, _), (now, n) in pairwise(record["arrivals"])
        for _ in range(n)
    ]


def by_category(records: Sequence[RecordDict], *, speculates: bool = False) -> dict[str, Any]:
    """Return `summarise` for every category; empty if the prompts have none."""
    names = sorted({record["category"] for record in records} - {""})
    return {
        name: summarise([r for r in records if r["category"] == name], speculates=speculates)
        for name in names
    }


def acceptance_by_depth(stats: Iterable[Mapping[str, Any] | None]) -> list[dict[str, int]] | None:
    """Return, for depth 1, 2, ..., the steps that tried a token there, and those that accepted it.

    None if no record has it.
    """
    known = [stat for stat in stats if stat and stat.get("tried_by_depth")]
    tried, accepted = (sum_by_depth(item[name] for item in known) for name in BY_DEPTH)
    counts = [{"tried": t, "accepted": a} for t, a in zip(tried, accepted, strict=True)]
    return counts or None


def pairwise_ratios(runs: Mapping[str, Sequence[RecordDict]]) -> dict[str, dict[str, Any]]:
    """Return name -> other -> {ratio, n_prompts, n_tokens}: speed ratio on the tokens of both.

    A slow program decodes fewer prompts and fewer tokens of each; its mean over other tokens is
    not comparable. So both are cut to the same positions of each output, `n_tokens` in all. Pairs
    without common tokens are left out.
    """
    ratios: dict[str, dict[str, Any]] = {}
    for name, records in runs.items():
        ratios[name] = {}
        for other, other_records in runs.items():
            pairs = list(_same_tokens(records, other_records)) if name != other else []
            seconds = [sum(sum(pair[i]) for pair in pairs) for i in (0, 1)]
            if all(seconds):
                ratios[name][other] = {
                    "ratio": ratio(seconds[1], seconds[0]),
                    "n_prompts": len(pairs),
                    "n_tokens": sum(len(own) for own, _ in pairs),
                }
    return ratios


def describe_ratio(result: Mapping[str, Any]) -> str:
    """Return the numbers of prompts and tokens of a ratio; older results lack the tokens."""
    text = count_of(result["n_prompts"], "prompt")
    return f"{text}, {count_of(result['n_tokens'], 'token')}" if "n_tokens" in result else text


def count_of(n: int, thing: str) -> str:
    """Return a count with its noun: 1 prompt, 2 prompts."""
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def _bytes_per_token(records: Sequence[RecordDict]) -> float | None:
    known = [record for record in records if record["bytes_read"] is not None]
    n_bytes = sum(record["bytes_read"][-1] - record["bytes_read"][1] for record in known)
    n_tokens = sum(len(seconds_of_tokens(record)) for record in known)
    return n_bytes / n_tokens if n_tokens else None


def _same_tokens(
    records: Sequence[RecordDict], other_records: Sequence[RecordDict]
) -> Iterator[tuple[list[float], list[float]]]:
    """Yield the seconds of the same tokens in both, for every prompt that has some."""
    theirs = {record["prompt"]: seconds_by_position(record) for record in other_records}
    for record in records:
        own, other = seconds_by_position(record), theirs.get(record["prompt"], {})
        shared = own.keys() & other.keys()
        if shared:
            yield [own[at] for at in shared], [other[at] for at in shared]


def seconds_by_position(record: RecordDict) -> dict[int, float]:
    """Return position in the output -> seconds, for every token after the first arrival."""
    first = record["arrivals"][0][1] if record["arrivals"] else 0
    return dict(enumerate(seconds_of_tokens(record), start=first))


# --- efficiency of speculation --------------------------------------------------------------------
#
# A pass of N tokens that emits L tokens, instead of L passes of one token, allows a speedup of at
# most L * T(1) / T(N). Drafting, acceptance and the rest of the loop reduce it.


def pass_times_of(records: Iterable[Mapping[str, Any]]) -> list[MeasuredPass]:
    """Return all passes of `bench.process.results.Record`s, also of those read from JSON."""
    return [
        MeasuredPass(int(item[0]), float(item[1]), bool(item[2]))
        for record in records
        for item in record["pass_times"]
    ]


def median_pass_seconds(times: Iterable[MeasuredPass], num_tokens: int) -> float | None:
    """Return the median seconds of passes with exactly so many tokens; None without any."""
    seconds = [time.seconds for time in times if time.num_tokens == num_tokens]
    return median(seconds) if seconds else None


def typical_pass_seconds(times: Iterable[MeasuredPass]) -> float | None:
    """Return the mean of the median seconds of each pass size, weighted by its number of passes.

    An outlier does not count, if there are others of its size. None without any pass.
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
    """Return speedup / (tokens per pass · T(1) / T(N)); None if a time is unknown."""
    if not seconds_1 or not seconds_n:
        return None
    return ratio(speedup, tokens_per_pass * seconds_1 / seconds_n)
