"""Gantt chart of a run, as PNG."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

from bench.process.results import write_whole
from bench.timeline.lanes import (
    ACCEPTANCE,
    DRAFTING,
    STORAGE,
    TARGET,
    Lane,
    Overlap,
    Timeline,
    TimelineError,
    overlap,
)
from offload.distribution import install_command
from offload.trace import LAYER, READ, WAIT, Event
from specdec.metrics.stats import ACCEPT, DRAFT, PASS, PREFILL

_WIDTH_INCHES, _DPI = 13.0, 130
# Colours that stay apart for most colour-blind readers (Okabe and Ito 2008).
_READ, _PASS, _WAIT, _DRAFT, _ACCEPT = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#333333"
_PASS_BACK, _DRAFT_BACK = "#CDEBE2", "#F3DCE8"
_ROW_HEIGHTS = {STORAGE: 0.45, TARGET: 1.0, DRAFTING: 0.8, ACCEPTANCE: 0.5}
_GAP = 0.18
_MIN_LABELLED = 0.035
"""Minimum share of the width for a layer to be labelled with its number."""
_NARROW = 0.004
"""Minimum share of the width for a bar to have an edge."""
_MAX_LABELLED = 6
"""Maximum number of steps whose outcome is labelled."""


def draw(timeline: Timeline, path: Path, *, title: str, n_steps: int) -> str:
    """Draw the steps in the middle of a run (0: all of it); return the overlap as a sentence.

    Raises TimelineError if matplotlib is missing or there is nothing to draw.
    """
    began, ended = timeline.steps(n_steps)
    check_matplotlib()
    from matplotlib.figure import Figure

    height = 1.9 + 0.75 * sum(_ROW_HEIGHTS[lane.group] + _GAP for lane in timeline.lanes)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI)
    axes = figure.subplots()
    top, ticks = 0.0, []
    for lane in timeline.lanes:
        size = _ROW_HEIGHTS[lane.group]
        _draw_lane(axes, lane, (began, ended), top + size, size)
        ticks.append((-(top + size / 2), lane.title))
        top += size + _GAP
    axes.set_xlim(0, (ended - began))
    axes.set_ylim(-top, _GAP)
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    sentence = _sentence(overlap(timeline, began, ended))
    axes.set_title(f"{title}\n{sentence}", loc="left", fontsize=10)
    axes.legend(
        handles=_legend(timeline),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.9 / height),
        ncol=7,
        frameon=False,
        fontsize=9,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    write_whole(path, buffer.getvalue())
    return sentence


def check_matplotlib() -> None:
    """Raise TimelineError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise TimelineError(
            f"drawing needs matplotlib: {install_command('bench')}, or give --trace alone"
        )


def _draw_lane(
    axes: Any, lane: Lane, window: tuple[float, float], bottom: float, size: float
) -> None:
    """Draw events as bars from -bottom upwards; nested events are drawn over enclosing ones."""
    began, ended = window
    shown = [e for e in lane.events if e.ended > began and e.started < ended]
    is_labelled = sum(e.kind == ACCEPT for e in shown) <= _MAX_LABELLED
    for kind, colour, inset in _STYLES:
        for number, event in enumerate(e for e in shown if e.kind == kind):
            low, high = max(event.started, began) - began, min(event.ended, ended) - began
            # A white edge would hide a narrow bar.
            is_wide = high - low > _NARROW * (ended - began)
            face = _shade(lane, kind, colour, number)
            axes.broken_barh(
                [(low, high - low)],
                (-bottom + inset * size, size * (1 - 2 * inset)),
                facecolors=face,
                edgecolors="white" if is_wide else face,
                linewidth=0.3 if is_wide else 0.0 if kind == WAIT else 0.6,
                hatch="////" if kind == WAIT else None,
            )
            middle = -bottom + size / 2
            if kind == LAYER and high - low > _MIN_LABELLED * (ended - began):
                _label(axes, event, (low + high) / 2, middle)
            if kind == ACCEPT and is_labelled:
                _label_beside(axes, event, low, middle)


_STYLES = (
    (PREFILL, _PASS_BACK, 0.0),
    (PASS, _PASS_BACK, 0.0),
    (DRAFT, _DRAFT_BACK, 0.0),
    (READ, _READ, 0.0),
    (LAYER, _PASS, 0.16),
    (WAIT, _WAIT, 0.16),
    (ACCEPT, _ACCEPT, 0.0),
)


def _shade(lane: Lane, kind: str, colour: str, number: int) -> str:
    """Return the colour of an event; neighbouring layers differ a little."""
    if kind != LAYER:
        return colour
    if lane.group == DRAFTING:
        return _DRAFT
    return colour if number % 2 else "#4FC3A1"


def _label(axes: Any, event: Event, x: float, y: float) -> None:
    text = event.name.removeprefix("layer ")
    axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white", clip_on=True)


def _label_beside(axes: Any, event: Event, x: float, y: float) -> None:
    """Label an event on the left of its bar, for the last one is at the edge of the picture."""
    axes.text(x, y, event.name + "  ", ha="right", va="center", fontsize=8, clip_on=True)


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    parts = [
        (READ, STORAGE, Patch(color=_READ, label="read from storage")),
        (PASS, TARGET, Patch(color=_PASS_BACK, label="target pass")),
        (LAYER, TARGET, Patch(color=_PASS, label="target layer in use")),
        (
            WAIT,
            TARGET,
            Patch(facecolor=_WAIT, edgecolor="white", hatch="////", label="waiting for storage"),
        ),
        (DRAFT, DRAFTING, Patch(color=_DRAFT_BACK, label="drafting")),
        (LAYER, DRAFTING, Patch(color=_DRAFT, label="draft layer in use")),
        (ACCEPT, ACCEPTANCE, Patch(color=_ACCEPT, label="acceptance")),
    ]
    present = {(e.kind, lane.group) for lane in timeline.lanes for e in lane.events}
    return [patch for kind, group, patch in parts if (kind, group) in present]


def _sentence(results: Overlap) -> str:
    def share(part: float, whole: float) -> str:
        return f"{part / whole:.0%}" if whole else "none"

    text = (
        f"of {results.seconds:.2f} s shown: storage busy "
        f"{share(results.reading, results.seconds)}; "
        f"passes {share(results.passing, results.seconds)}, waiting for storage in "
        f"{share(results.waiting, results.passing)} of them"
    )
    if results.drafting:
        text += (
            f"; drafting {share(results.drafting, results.seconds)}, beside reads "
            f"{share(results.drafting_beside_reads, results.drafting)} of it, beside a pass "
            f"{share(results.drafting_beside_passes, results.drafting)}"
        )
    return text
