"""Timeline of one run: lanes of events of storage, target and draft.

A lane has the events of one thread and one kind, so that they follow each other or are nested, and
never cross. Times are seconds from the start of the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.errors import SpecdecError
from offload.trace import LAYER, READ, WAIT, Event, Trace, recording
from specdec.metrics.stats import ACCEPT, DRAFT, PASS, PREFILL

if TYPE_CHECKING:
    from specdec.api import LLM
    from specdec.text.prompts import Prompt

STORAGE, TARGET, DRAFTING, ACCEPTANCE = "storage", "target", "drafting", "acceptance"
GROUPS = (STORAGE, TARGET, DRAFTING, ACCEPTANCE)
"""Kinds of lanes, from top to bottom."""
_GROUP_OF = {READ: STORAGE, PREFILL: TARGET, PASS: TARGET, DRAFT: DRAFTING, ACCEPT: ACCEPTANCE}
_TITLES = {STORAGE: "reader", TARGET: "target pass", ACCEPTANCE: "acceptance"}
"""Titles of lanes; a lane of drafting has the name of its events, "draft" or "draft ahead"."""


class TimelineError(SpecdecError):
    """There is nothing to draw."""


@dataclass(frozen=True)
class Lane:
    """Events of one thread and one kind."""

    group: str
    title: str
    events: tuple[Event, ...]
    """Events by their start; an enclosing event comes before its nested ones."""


@dataclass(frozen=True)
class Timeline:
    """Lanes of one run."""

    lanes: tuple[Lane, ...]
    seconds: float
    n_dropped: int = 0

    def events(self, kind: str) -> list[Event]:
        result = [event for lane in self.lanes for event in lane.events if event.kind == kind]
        return sorted(result, key=lambda event: event.started)

    def steps(self, n_steps: int) -> tuple[float, float]:
        """Return the time span of so many steps in the middle, each from drafting to acceptance."""
        passes = self.events(PASS)
        if not passes:
            raise TimelineError("the run had no decode pass: ask for more tokens with -n")
        if n_steps == 0:
            return 0.0, self.seconds
        first = max(0, (len(passes) - n_steps) // 2)
        shown = passes[first : first + n_steps]
        # The span includes the first pass's drafting and the last one's acceptance.
        before = [e.ended for e in self.events(ACCEPT) if e.ended <= shown[0].started]
        after = [e.ended for e in self.events(ACCEPT) if e.ended >= shown[-1].ended]
        prefill = self.events(PREFILL)
        began = max(before, default=prefill[-1].ended if prefill else 0.0)
        return began, min(after, default=self.seconds)


def record_run(
    llm: LLM, prompt: Prompt, options: dict[str, Any], draft: Path | None = None
) -> tuple[Timeline, dict[str, Any]]:
    """Generate once with recording on; return the lanes and the run's statistics.

    draft: path of the draft model, whose reads get lanes of their own.
    """
    with recording() as trace:
        result = llm.generate(prompt, **options)
    return make_timeline(trace, draft), result.stats.to_dict()


def make_timeline(trace: Trace, draft: Path | None = None) -> Timeline:
    """Sort events into lanes; draft: its directory or file."""
    if not trace.events:
        raise TimelineError("nothing was recorded")
    origin = min(event.started for event in trace.events)
    events = [
        event._replace(started=event.started - origin, ended=event.ended - origin)
        for event in _with_acceptance(trace.events)
    ]
    by_lane: dict[tuple[str, str, int], list[Event]] = {}
    for event, (group, title, thread) in zip(events, _places(events), strict=True):
        owner = "draft " if _belongs(event, draft) else ""
        by_lane.setdefault((group, owner + title, thread), []).append(event)
    lanes: list[Lane] = []
    for group in GROUPS:
        for title in dict.fromkeys(key[1] for key in by_lane if key[0] == group):
            result = [item for key, item in by_lane.items() if key[:2] == (group, title)]
            result.sort(key=lambda item: min(event.started for event in item))
            for number, item in enumerate(result):
                name = f"{title} {number + 1}" if len(result) > 1 else title
                lanes.append(Lane(group, name, tuple(sorted(item, key=_nesting))))
    return Timeline(tuple(lanes), max(event.ended for event in events), trace.n_dropped)


def _with_acceptance(events: Iterable[Event]) -> Iterator[Event]:
    """Set the start of acceptance events, whose end alone was recorded, to their pass's end."""
    verified = 0.0
    for event in sorted(events, key=lambda item: item.ended):
        if event.kind == PASS:
            verified = event.ended
        yield event._replace(started=verified) if event.kind == ACCEPT else event


def _belongs(event: Event, model: Path | None) -> bool:
    """Return whether an event is a read of that model's files."""
    return event.path is not None and model in (event.path, *event.path.parents)


def _nesting(event: Event) -> tuple[float, float]:
    return event.started, -event.ended


def _places(events: Sequence[Event]) -> list[tuple[str, str, int]]:
    """Return (group, title, thread) of the lane of each event.

    Both models have layers, and some backends compute in a thread of their own. So layers and waits
    are in the lane of the event that encloses them: drafting or pass of their own thread, else the
    pass that ran then, else the drafting.
    """
    holders = [event for event in events if event.kind in (PASS, PREFILL, DRAFT)]
    holders.sort(key=lambda item: item.kind == DRAFT)
    busy = {item.thread for item in holders}
    places = []
    for event in events:
        holder = event
        if event.kind in (LAYER, WAIT):
            own = (e for e in holders if e.thread == event.thread or event.thread not in busy)
            holder = next((item for item in own if _is_within(event, item)), event)
        group = _GROUP_OF.get(holder.kind, TARGET)
        title = _TITLES.get(group) or holder.name
        places.append((group, title, holder.thread))
    return places


def _is_within(event: Event, holder: Event) -> bool:
    return holder.started <= event.started and event.ended <= holder.ended


# --- overlap --------------------------------------------------------------------------------------

Span = tuple[float, float]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans of time, as spans that do not touch."""
    union: list[Span] = []
    for started, ended in sorted(spans):
        if union and started <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], ended))
        elif ended > started:
            union.append((started, ended))
    return union


def common_seconds(item: Iterable[Span], other: Iterable[Span]) -> float:
    """Return the seconds that are in both."""
    left, right = merged(item), merged(other)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass(frozen=True)
class Overlap:
    """Overlap in seconds within the part of a run that is shown."""

    seconds: float
    reading: float
    passing: float
    waiting: float
    """Time of passes waiting for storage."""
    drafting: float
    drafting_beside_reads: float
    drafting_beside_passes: float


def overlap(timeline: Timeline, began: float, ended: float) -> Overlap:
    window = [(began, ended)]
    reads = _spans(timeline, STORAGE, (READ,))
    passes = _spans(timeline, TARGET, (PASS, PREFILL))
    waits = _spans(timeline, TARGET, (WAIT,))
    drafts = _spans(timeline, DRAFTING, (DRAFT,))
    return Overlap(
        ended - began,
        common_seconds(reads, window),
        common_seconds(passes, window),
        common_seconds(waits, window),
        common_seconds(drafts, window),
        common_seconds(_cut(drafts, window), reads),
        common_seconds(_cut(drafts, window), passes),
    )


def _spans(timeline: Timeline, group: str, kinds: Sequence[str]) -> list[Span]:
    return [
        (event.started, event.ended)
        for lane in timeline.lanes
        if lane.group == group
        for event in lane.events
        if event.kind in kinds
    ]


def _cut(spans: Iterable[Span], window: Sequence[Span]) -> list[Span]:
    low, high = window[0]
    return [(max(a, low), min(b, high)) for a, b in spans if a < high and b > low]


# --- Chrome's trace format ------------------------------------------------------------------------


def chrome_trace(timeline: Timeline, about: dict[str, Any]) -> dict[str, Any]:
    """Return a trace for chrome://tracing and Perfetto ("Trace Event Format", JSON object form):
    complete events in microseconds, a thread per lane, named and sorted by metadata events."""
    result: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "specdec"})]
    for number, lane in enumerate(timeline.lanes):
        result.append(_metadata("thread_name", number, {"name": lane.title}))
        result.append(_metadata("thread_sort_index", number, {"sort_index": number}))
        result += [_complete(event, lane, number) for event in lane.events]
    return {"traceEvents": result, "displayTimeUnit": "ms", "otherData": about}


def _metadata(name: str, lane: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": lane, "name": name, "args": arguments}


def _complete(event: Event, lane: Lane, number: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    if event.kind == READ:
        arguments = {"bytes": event.n_bytes, "file": event.path.name if event.path else ""}
    return {
        "ph": "X",
        "pid": 1,
        "tid": number,
        "name": event.name,
        "cat": f"{lane.group},{event.kind}",
        "ts": event.started * 1e6,
        "dur": (event.ended - event.started) * 1e6,
        "args": arguments,
    }
