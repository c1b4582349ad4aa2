"""Points of a speedup curve from its records. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench import results
from bench.decode.known_drafter import expected_tokens
from bench.results import efficiency, median_pass_seconds, pass_times_of
from specdec.metrics.stats import ratio

PLAIN_ROWS = 1
"""Tokens of a plain pass: the pending token alone."""


def standard_error(accuracy: float, n_drafted: int, n_passes: int) -> float:
    """Return the standard error of the mean tokens per pass over chains of known accuracy.

    E[X²] = Σ (2k - 1)·P(X ≥ k), and P(X ≥ k) = a^(k-1) for the k-th of at most n + 1 tokens.
    """
    square = sum((2 * k + 1) * accuracy**k for k in range(n_drafted + 1))
    variance = max(0.0, square - expected_tokens(accuracy, n_drafted) ** 2)
    return math.sqrt(ratio(variance, n_passes))


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the curve's points:

        points          for each rate and chain length:
            rate, n_draft_tokens    as requested
            accuracy                accepted / tried guesses: the measured rate
            tokens_per_pass, expected_tokens_per_pass, standard_error (of the former's mean)
            tokens_per_second, speedup (over plain decoding in the turns of the same rate)
            predicted_speedup       expected tokens per pass · T(1) / T(N)
            pass_seconds            T(N), median of the passes of N = n_draft_tokens + 1 tokens
            plain_pass_seconds      T(1) in the same turns
            efficiency              speedup / (tokens per pass · T(1) / T(N))
            passes
        best            for each rate, n_draft_tokens and speedup of the fastest chain

    Args:
        records: those of `bench.decode.curve.measure_curve`; n_draft_tokens is 0 if plain.
    """
    points = []
    for rate in dict.fromkeys(record["rate"] for record in records):
        turns = [record for record in records if record["rate"] == rate]
        plain = [record for record in turns if not record["n_draft_tokens"]]
        for length in sorted({r["n_draft_tokens"] for r in turns} - {0}):
            chains = [record for record in turns if record["n_draft_tokens"] == length]
            points.append(_point(rate, length, plain, chains))
    best = []
    for rate in dict.fromkeys(point["rate"] for point in points):
        fastest = max(
            (point for point in points if point["rate"] == rate), key=lambda item: item["speedup"]
        )
        best.append({key: fastest[key] for key in ("rate", "n_draft_tokens", "speedup")})
    return {"points": points, "best": best}


def _point(
    rate: float,
    length: int,
    plain: Sequence[Mapping[str, Any]],
    chains: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    stats, plain_stats = results.aggregate_stats(chains), results.aggregate_stats(plain)
    speedup = ratio(stats["tokens_per_second"], plain_stats["tokens_per_second"])
    seconds_1 = median_pass_seconds(pass_times_of(plain), PLAIN_ROWS)
    seconds_n = median_pass_seconds(pass_times_of(chains), PLAIN_ROWS + length)
    expected = expected_tokens(rate, length)
    return {
        "rate": rate,
        "n_draft_tokens": length,
        "accuracy": ratio(sum(stats["accepted_by_depth"]), sum(stats["tried_by_depth"])),
        "tokens_per_pass": stats["mean_acceptance_length"],
        "expected_tokens_per_pass": expected,
        "standard_error": standard_error(rate, length, stats["passes"]),
        "tokens_per_second": stats["tokens_per_second"],
        "speedup": speedup,
        "predicted_speedup": expected * ratio(seconds_1 or 0.0, seconds_n or 0.0),
        "pass_seconds": seconds_n,
        "plain_pass_seconds": seconds_1,
        "efficiency": efficiency(speedup, stats["mean_acceptance_length"], seconds_1, seconds_n),
        "passes": stats["passes"],
    }
