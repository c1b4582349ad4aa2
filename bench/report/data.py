"""Data of the plots from result files of every kind. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any

from bench import results
from bench.decode.known_drafter import expected_tokens
from bench.decode.modes import AUTO, PLAIN, SPECULATIVE
from bench.peers.compare import label
from bench.process.results import CURVE, PEERS, POLICY, SPEEDUP, SWEEP, Results
from bench.results import count_of
from specdec.metrics.stats import ratio

MIN_TRIED = 5
"""Minimum number of steps for a share to be drawn."""


@dataclass(frozen=True)
class Bar:
    """Speed of one program."""

    name: str
    tokens_per_second: float | None
    note: str
    """Text beside the bar: tokens per pass, or why there is none."""
    is_ours: bool


@dataclass(frozen=True)
class Point:
    """Measured speed at one budget."""

    series: str
    """Name of the line: "plain" or the kind of drafting."""
    storage_mbps: float | None
    """Limit of reads; None: no limit."""
    budget_bytes: int
    tokens_per_second: float
    bytes_per_pass: int | None
    storage_bytes_per_second: float | None
    """Storage speed: probed, or the limit if that is lower."""
    tokens_per_pass: float

    @property
    def roofline(self) -> float | None:
        """Return tokens/s if passes did nothing but read at full speed; None without reads."""
        if not self.bytes_per_pass or not self.storage_bytes_per_second:
            return None
        return self.tokens_per_pass * self.storage_bytes_per_second / self.bytes_per_pass


@dataclass(frozen=True)
class Depths:
    """Acceptance by depth of one measurement; index 0 is depth 1."""

    name: str
    tried: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """Speedups with chains of one length."""

    n_draft_tokens: int
    relative_pass_seconds: float
    """T(N) / T(1): geometric mean over the rates."""
    measured: tuple[tuple[float, float, float], ...]
    """(acceptance rate, speedup, its standard error from random guesses)."""

    def predicted(self, rate: float) -> float:
        """Return the speedup if nothing but passes took time."""
        return expected_tokens(rate, self.n_draft_tokens) / self.relative_pass_seconds


def bars(results: Results) -> list[Bar]:
    """Return the bars of a comparison of programs, of a speedup, or of tree sizes."""
    if results.kind == POLICY:
        rows = results.value["rows"]
        return [_speedup_bar(row["mode"], row, row["mode"] == AUTO) for row in rows]
    if results.kind == PEERS:
        return _peer_bars(results.value["peers"])
    if results.kind == SPEEDUP:
        value = results.value
        named = (("specdec-plain", value["plain"]), ("specdec", value["speculative"]))
        return [_speedup_bar(name, stats, True) for name, stats in named]
    return []


def points(several: Iterable[Results]) -> list[Point]:
    """Return every speed that was measured at a known budget.

    Each file has lines of its own, as drafts and sampling may differ.
    """
    result = {results.name: made for results in several if (made := _points_of(results))}
    if len(result) == 1:
        return next(iter(result.values()))
    return [replace(p, series=f"{p.series}: {name}") for name in result for p in result[name]]


def _points_of(results: Results) -> list[Point]:
    if results.kind == SWEEP:
        lines = results.value["settings"]
        return [_sweep_point(line) for line in lines if line["tokens_per_second"]]
    return _speedup_points(results.value) if results.kind == SPEEDUP else []


def depths(several: Iterable[Results]) -> list[Depths]:
    """Return acceptance by depth, up to the depth that at least MIN_TRIED steps reached."""
    result: dict[str, list[Depths]] = {}
    for recorded in several:
        shown = [cut for item in _depths_of(recorded) if (cut := _cut(item)).tried]
        if shown:
            result[recorded.name] = shown
    if len(result) == 1:
        return next(iter(result.values()))
    return [replace(item, name=f"{name}: {item.name}") for name in result for item in result[name]]


def _depths_of(results: Results) -> list[Depths]:
    if results.kind == PEERS:
        rows = results.value["peers"]
        return _depths((label(row, rows), row.get("acceptance_by_depth")) for row in rows)
    if results.kind == SWEEP:
        return _sweep_depths(results.value["settings"])
    stats = results.value["speculative"] if results.kind == SPEEDUP else {}
    if not stats.get("tried_by_depth"):
        return []
    return [Depths("specdec", tuple(stats["tried_by_depth"]), tuple(stats["accepted_by_depth"]))]


def _cut(item: Depths) -> Depths:
    """Return the depths that at least MIN_TRIED steps reached."""
    n = sum(tried >= MIN_TRIED for tried in item.tried)
    return Depths(item.name, item.tried[:n], item.accepted[:n])


def _peer_bars(rows: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """Return a bar per program, with its number of tokens if programs decoded different ones."""
    counts = {(row["n_prompts"], row["n_tokens"]) for row in rows if row["tokens_per_second"]}
    return [
        _counted(bar, row["n_prompts"], row["n_tokens"])
        if len(counts) > 1 and row["tokens_per_second"]
        else bar
        for row, bar in ((row, _peer_bar(row, rows)) for row in rows)
    ]


def _peer_bar(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Bar:
    note = ""
    if row["exit"] != "ok":
        note = f"{row['exit']}: {row['reason']}"
    elif row["mean_acceptance_length"]:
        note = f"{row['mean_acceptance_length']:.1f} tokens per pass"
    is_ours = str(row["peer"]).startswith("specdec")
    return Bar(label(row, rows), row["tokens_per_second"], note, is_ours)


def _speedup_bar(name: str, stats: Mapping[str, Any], is_ours: bool) -> Bar:
    length = stats.get("mean_acceptance_length", 1.0)
    note = f"{length:.1f} tokens per pass" if length > 1 else ""
    note = (note + results.lossy_mark(stats)).strip()
    return Bar(name, stats["tokens_per_second"], note, is_ours)


def _counted(bar: Bar, n_prompts: int, n_tokens: int) -> Bar:
    counts = f"{count_of(n_prompts, 'prompt')}, {count_of(n_tokens, 'token')}"
    return replace(bar, note=f"{bar.note}; {counts}" if bar.note else counts)


def _sweep_point(line: Mapping[str, Any]) -> Point:
    setting = line["setting"]
    mbps = setting["storage_mbps"]
    probed = line["storage_bytes_per_second"]
    return Point(
        series=series_name(setting["num_draft_tokens"]) + results.lossy_mark(line),
        storage_mbps=mbps,
        budget_bytes=setting["memory_budget_bytes"],
        tokens_per_second=line["tokens_per_second"],
        bytes_per_pass=line["bytes_per_pass"],
        storage_bytes_per_second=probed if mbps is None else min(probed, mbps * 1e6),
        tokens_per_pass=line["mean_acceptance_length"] or 1.0,
    )


def series_name(num_draft_tokens: int | None) -> str:
    """Return the name of a tree's size: None is auto, 0 plain decoding."""
    if num_draft_tokens == 0:
        return PLAIN
    return "tree: auto" if num_draft_tokens is None else f"tree: {num_draft_tokens} tokens"


def _speedup_points(value: Mapping[str, Any]) -> list[Point]:
    return [
        Point(
            series=mode + results.lossy_mark(value[mode]),
            storage_mbps=None,
            budget_bytes=value["memory_budget_bytes"],
            tokens_per_second=value[mode]["tokens_per_second"],
            bytes_per_pass=value["bytes_per_pass"],
            storage_bytes_per_second=value["storage_bytes_per_second"],
            tokens_per_pass=value[mode]["mean_acceptance_length"],
        )
        for mode in (PLAIN, SPECULATIVE)
    ]


def _depths(named: Iterable[tuple[str, Sequence[Mapping[str, int]] | None]]) -> list[Depths]:
    return [
        Depths(name, tuple(c["tried"] for c in counts), tuple(c["accepted"] for c in counts))
        for name, counts in named
        if counts
    ]


def _sweep_depths(lines: Sequence[Mapping[str, Any]]) -> list[Depths]:
    """Sum acceptance over budgets and storage speeds, on which it does not depend."""
    result = []
    for size in dict.fromkeys(line["setting"]["num_draft_tokens"] for line in lines):
        counts = [
            line["acceptance_by_depth"]
            for line in lines
            if line["setting"]["num_draft_tokens"] == size and line["acceptance_by_depth"]
        ]
        sums = [
            results.sum_by_depth([[c[key] for c in count] for count in counts])
            for key in ("tried", "accepted")
        ]
        if sums[0]:
            result.append(Depths(series_name(size), sums[0], sums[1]))
    return result


def share(numerators: Sequence[int], denominators: Sequence[int]) -> list[float]:
    """Return ratios element by element."""
    return [ratio(n, d) for n, d in zip(numerators, denominators, strict=True)]


def curves(results: Results) -> list[Curve]:
    """Return a curve for each chain length with timed passes, shortest first."""
    if results.kind != CURVE:
        return []
    points = [point for point in results.value["points"] if point["efficiency"] is not None]
    result = []
    for length in sorted({point["n_draft_tokens"] for point in points}):
        chosen = [point for point in points if point["n_draft_tokens"] == length]
        relative = geometric_mean(p["pass_seconds"] / p["plain_pass_seconds"] for p in chosen)
        result.append(Curve(length, relative, tuple(map(_measured, chosen))))
    return result


def _measured(point: Mapping[str, Any]) -> tuple[float, float, float]:
    relative = ratio(point["standard_error"], point["expected_tokens_per_pass"])
    return point["rate"], point["speedup"], point["speedup"] * relative
