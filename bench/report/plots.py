"""Pictures of the report, as matplotlib figures, without windows and global state."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from bench.decode.modes import PLAIN
from bench.report.data import Bar, Curve, Depths, Point, share
from offload.distribution import install_command
from offload.errors import SpecdecError
from offload.units import GIB

# Okabe and Ito's colours, which colour-blind readers can distinguish.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("o-", "s--", "^:")
"""Line styles, one for each cycle through the colours."""
_OURS, _THEIRS, _FAINT = "#0072B2", "#8C8C8C", "#666666"


def speed_bars(bars: Sequence[Bar], title: str) -> Any:
    """Plot tokens per second by program, or the reason if there is none."""
    figure = _figure(8.0, 0.9 + 0.42 * len(bars))
    axes = figure.add_subplot()
    largest = max((bar.tokens_per_second or 0.0 for bar in bars), default=0.0) or 1.0
    for index, bar in enumerate(bars):
        speed = bar.tokens_per_second
        if speed is not None:
            axes.barh(index, speed, color=_OURS if bar.is_ours else _THEIRS, height=0.62)
        value = "" if speed is None else f"{speed:.2f}" + ("   " if bar.note else "")
        at = (speed or 0.0) + 0.01 * largest
        value_label = axes.text(at, index, value, va="center", fontweight="bold")
        axes.annotate(
            _shortened(bar.note),
            (1, 0.5),
            xycoords=value_label,
            va="center",
            fontsize=8.5,
            color=_FAINT,
        )
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * largest)
    axes.set_xlabel("tokens per second")
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def speed_against_budget(points: Sequence[Point], title: str) -> Any:
    """Plot one panel for each storage speed; dashed is the roofline of reading alone."""
    speeds = sorted(
        {p.storage_mbps for p in points}, key=lambda s: float("inf") if s is None else s
    )
    names = sorted({p.series for p in points}, key=lambda name: (name != PLAIN, name))
    colours = dict(zip(names, _COLOURS * len(names), strict=False))
    n_columns = min(len(speeds), 2)
    num_rows = -(-len(speeds) // n_columns)
    height = 3.1 * num_rows + 0.9 + 0.12 * max(0, len(names) - 3)
    figure = _figure(5.0 * n_columns + 1.5 * (n_columns == 1), height)
    grid = figure.subplots(num_rows, n_columns, sharey=True, sharex=True, squeeze=False)
    panels = list(grid.flat)[: len(speeds)]
    for unused in list(grid.flat)[len(speeds) :]:
        unused.set_visible(False)
    for axes, speed in zip(panels, speeds, strict=True):
        inside = [p for p in points if p.storage_mbps == speed]
        for name in names:
            _draw_series(axes, [p for p in inside if p.series == name], colours[name], name)
        axes.set_title(_storage_name(speed, inside), fontsize=10)
        _tidy_log_axis(axes, points)
    for axes in panels[-n_columns:]:
        axes.set_xlabel("memory budget, GiB")
        axes.tick_params(labelbottom=True)
    for row in grid:
        row[0].set_ylabel("tokens per second")
    _legend(figure, panels, {"reading alone at full speed (roofline)": ("--", _FAINT)})
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def acceptance_by_depth(several: Sequence[Depths], title: str) -> Any:
    """Plot the share of steps that accept a token at each depth, and accepted / tried."""
    figure = _figure(9.0, 3.9 + 0.1 * len(several))
    reach, each = figure.subplots(1, 2)
    for index, item in enumerate(several):
        colour = _COLOURS[index % len(_COLOURS)]
        style = _STYLES[index // len(_COLOURS) % len(_STYLES)]
        at = range(1, len(item.tried) + 1)
        num_steps = [item.tried[0]] * len(item.tried)
        reach.plot(
            at, share(item.accepted, num_steps), style, color=colour, ms=3.5, label=item.name
        )
        each.plot(at, share(item.accepted, item.tried), style, color=colour, ms=3.5)
    deepest = max(len(item.tried) for item in several)
    reach.set_title("steps that accept a token at this depth", fontsize=10)
    each.set_title("accepted / tried draft tokens at this depth", fontsize=10)
    for axes in (reach, each):
        axes.set_ylim(0, 1.03)
        axes.set_xlim(0.5, deepest + 0.5)
        axes.set_xlabel("depth in the draft tree")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    reach.set_ylabel("share")
    _legend(figure, [reach], {})
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def speedup_curves(curves: Sequence[Curve], title: str) -> Any:
    """Plot measured speedups and the lines predicted from pass times, by chain length."""
    figure = _figure(8.6, 4.9)
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    axes = figure.add_subplot()
    rates = [rate for curve in curves for rate, *_ in curve.measured]
    low, high = max(0.0, min(rates) - 0.03), min(1.0, max(rates) + 0.02)
    step = 0.006 * (high - low)  # side by side, so that error bars do not overlap
    for i, curve in enumerate(curves):
        colour = colormaps["viridis"](0.9 * i / max(1, len(curves) - 1))
        aside = step * (i - (len(curves) - 1) / 2)
        _draw_curve(axes, curve, colour, (low, high), aside)
    axes.axhline(1.0, color=_FAINT, lw=0.9, ls=":")
    axes.annotate(
        "plain decoding", (low, 1.0), xytext=(3, 3), textcoords="offset points",
        fontsize=8.5, color=_FAINT,
    )  # fmt: skip
    shown = [1.0]
    shown += [value for c in curves for _, s, error in c.measured for value in (s, s + error)]
    shown += [curve.predicted(rate) for curve in curves for rate in (low, high)]
    _tidy_log_ticks(axes)
    axes.set_ylim(min(shown) / 1.15, max(shown) * 1.15)
    axes.set_xlim(low, high)
    axes.set_xlabel("acceptance rate: probability that a draft token is right")
    axes.set_ylabel("speedup over plain decoding")
    handles, labels = axes.get_legend_handles_labels()
    handles += [
        Line2D([], [], color=_FAINT, lw=1.4),
        Line2D([], [], color=_FAINT, marker="o", ls=""),
    ]
    labels += [
        "expected tokens per pass\nx T(1) / T(N)",
        "measured, with\nstandard errors",
    ]
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def to_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    return buffer.getvalue()


def _figure(width: float, height: float) -> Any:
    """Return a figure of a size in inches. Raises SpecdecError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecdecError(
            f"plots need matplotlib, which is not installed: {install_command('bench')}"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_series(axes: Any, points: Sequence[Point], colour: str, name: str) -> None:
    points = sorted(points, key=lambda point: point.budget_bytes)
    at = [point.budget_bytes / GIB for point in points]
    axes.plot(at, [p.tokens_per_second for p in points], "o-", color=colour, ms=4, label=name)
    lines = [(p.budget_bytes / GIB, p.roofline) for p in points if p.roofline is not None]
    if lines:
        axes.plot(*zip(*lines, strict=True), "--", marker="_", color=colour, lw=1.1)
    reading = [point for point in points if point.roofline is not None]
    axes.fill_between(
        [point.budget_bytes / GIB for point in reading],
        [point.tokens_per_second for point in reading],
        [point.roofline for point in reading],
        color=colour,
        alpha=0.13,
        linewidth=0,
    )


def _draw_curve(
    axes: Any, curve: Curve, colour: Any, between: tuple[float, float], aside: float
) -> None:
    """Draw the line between two rates, and points with standard errors, shifted by `aside`."""
    low, high = between
    at = [low + (high - low) * i / 200 for i in range(201)]
    axes.plot(at, [curve.predicted(rate) for rate in at], "-", color=colour, lw=1.4)
    rates, speedups, errors = zip(*curve.measured, strict=True)
    beside = [rate + aside for rate in rates]
    tokens = "token" if curve.n_draft_tokens == 1 else "tokens"
    label = f"{curve.n_draft_tokens} draft {tokens}, T(N) = {curve.relative_pass_seconds:.2f} T(1)"
    axes.errorbar(
        beside, speedups, errors, fmt="o", color=colour, ms=4.5, elinewidth=0.9, label=label
    )


def _tidy_log_axis(axes: Any, points: Sequence[Point]) -> None:
    _tidy_log_ticks(axes)
    rooflines = [p.roofline for p in points if p.roofline is not None]
    measured = [p.tokens_per_second for p in points]
    # Rooflines go to infinity where almost nothing is read.
    highest = max(max(measured), min(max(rooflines, default=0.0), 2.5 * max(measured)))
    axes.set_ylim(min(measured) / 1.5, highest * 1.4)
    axes.set_xlim(left=0)


def _tidy_log_ticks(axes: Any) -> None:
    """Set ticks at 1, 2, 5, 10 ... as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, panels: Sequence[Any], more: Mapping[str, tuple[str, str]]) -> None:
    """Draw one legend for all panels, below them."""
    from matplotlib.lines import Line2D

    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    for name, (style, colour) in more.items():
        entries[name] = Line2D([], [], linestyle=style, color=colour)
    inches = 0.6 + 0.075 * max(map(len, entries))  # of the widest column
    n_columns = max(1, min(len(entries), 4, int(figure.get_figwidth() / inches)))
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside lower center",
        ncols=n_columns,
        frameon=False,
        fontsize=8.5,
    )


def _storage_name(speed: float | None, points: Sequence[Point]) -> str:
    if speed is not None:
        return f"storage limited to {speed:g} MB/s"
    probed = [p.storage_bytes_per_second for p in points if p.storage_bytes_per_second]
    return f"storage at {sum(probed) / len(probed) / 1e9:.1f} GB/s" if probed else "storage"


def _shortened(text: str) -> str:
    return text if len(text) <= 72 else text[:71] + "…"
