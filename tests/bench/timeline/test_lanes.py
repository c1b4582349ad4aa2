"""The timeline: nested lanes, byte sums, files that open."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forced_streaming import force_streaming
from gguf_models import save_tiny_gguf
from hypothesis import given
from hypothesis import strategies as st
from tiny_pair import save_model

from bench.commands.app import main
from bench.timeline.lanes import (
    ACCEPTANCE,
    DRAFTING,
    GROUPS,
    STORAGE,
    TARGET,
    Timeline,
    TimelineError,
    chrome_trace,
    common_seconds,
    make_timeline,
    merged,
    overlap,
    record_run,
)
from offload import trace as tracing
from offload.trace import LAYER, READ, WAIT, Event, Trace
from specdec.api import load
from specdec.metrics.stats import ACCEPT, DRAFT, PASS, PREFILL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("timeline") / "target", seed=1)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Timeline, dict[str, Any]]:
    """A run with a target and a draft that both stream."""
    draft = save_model(tmp_path_factory.mktemp("timeline") / "draft", seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        force_streaming(patch)
        with load(model, draft, threads=1, num_draft_tokens=4) as llm:
            return record_run(llm, "Hello", {"max_tokens": 9, "ignore_eos": True}, draft)


def test_events_of_a_lane_nest(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, _ = run
    for lane in timeline.lanes:
        open_until: list[float] = []
        for event in lane.events:
            assert event.started <= event.ended
            while open_until and open_until[-1] <= event.started:
                open_until.pop()
            assert not open_until or event.ended <= open_until[-1], (lane.title, event)
            open_until.append(event.ended)
        tops = [e for e in lane.events if e.kind in (READ, PASS, PREFILL, DRAFT, ACCEPT)]
        assert all(a.ended <= b.started for a, b in pairwise(tops)), lane.title


def test_lanes_hold_what_the_run_did(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, stats = run
    assert [lane.group for lane in timeline.lanes] == sorted(
        (lane.group for lane in timeline.lanes), key=GROUPS.index
    )
    kinds = {
        group: {e.kind for lane in timeline.lanes if lane.group == group for e in lane.events}
        for group in GROUPS
    }
    assert kinds[STORAGE] == {READ}
    assert kinds[TARGET] >= {PREFILL, PASS, LAYER, WAIT}
    assert kinds[DRAFTING] >= {DRAFT, LAYER, WAIT}
    assert kinds[ACCEPTANCE] == {ACCEPT}
    assert len(timeline.events(PASS)) == len(timeline.events(ACCEPT)) == stats["passes"]
    (target,) = [lane for lane in timeline.lanes if lane.group == TARGET]
    waited = sum(e.ended - e.started for e in target.events if e.kind == WAIT)
    assert waited == pytest.approx(stats["stall_seconds"])
    passed = sum(e.ended - e.started for e in timeline.events(PASS))
    assert passed == pytest.approx(stats["pass_seconds"], rel=0.05, abs=1e-3)


def test_every_pass_uses_every_layer(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, _ = run
    (target,) = [lane for lane in timeline.lanes if lane.group == TARGET]
    for item in (e for e in target.events if e.kind in (PASS, PREFILL)):
        names = [
            e.name
            for e in target.events
            if e.kind == LAYER and item.started <= e.started and e.ended <= item.ended
        ]
        assert names == [f"layer {i}" for i in range(len(names))] != []


def test_reads_of_the_two_models_are_apart(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, _ = run
    for lane in (lane for lane in timeline.lanes if lane.group == STORAGE):
        (folder,) = {e.path.parent.name for e in lane.events if e.path is not None}
        assert lane.title.startswith("draft reader" if folder == "draft" else "reader")
    titles = {lane.title.rpartition(" ")[0] for lane in timeline.lanes if lane.group == STORAGE}
    assert titles == {"reader", "draft reader"}


def test_nothing_is_recorded_by_default(model: Path) -> None:
    with load(model, threads=1) as llm:
        llm.generate("Hello", max_tokens=2)
    assert tracing._trace is None


def test_chrome_trace(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, stats = run
    value = json.loads(json.dumps(chrome_trace(timeline, {"stats": stats})))
    assert value["otherData"]["stats"] == stats
    named = {
        e["tid"]: e["args"]["name"] for e in value["traceEvents"] if e["name"] == "thread_name"
    }
    assert list(named.values()) == [lane.title for lane in timeline.lanes]
    complete = [e for e in value["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == sum(len(lane.events) for lane in timeline.lanes)
    assert {e["ph"] for e in value["traceEvents"]} == {"X", "M"}
    for event in complete:
        assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"}
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["tid"] in named
    last = max(e["ts"] + e["dur"] for e in complete)
    assert last == pytest.approx(timeline.seconds * 1e6)
    reads = [e for e in complete if e["cat"] == "storage,read"]
    assert sum(e["args"]["bytes"] for e in reads) == sum(e.n_bytes for e in timeline.events(READ))
    assert all(e["args"]["file"].endswith(".safetensors") for e in reads)


def test_the_steps_shown_are_whole(run: tuple[Timeline, dict[str, Any]]) -> None:
    timeline, _ = run
    passes = timeline.events(PASS)
    assert timeline.steps(0) == (0.0, timeline.seconds)
    for n_steps in range(1, len(passes) + 1):
        began, ended = timeline.steps(n_steps)
        whole = [e for e in passes if began <= e.started and e.ended <= ended]
        assert len(whole) == n_steps
        assert not [e for e in passes if e not in whole and e.ended > began and e.started < ended]


def test_a_run_without_passes_has_no_steps() -> None:
    trace = Trace(10)
    with pytest.raises(TimelineError, match="nothing was recorded"):
        make_timeline(trace)
    trace.add(Event(PREFILL, "prompt", 1.0, 2.0, 1))
    with pytest.raises(TimelineError, match="no decode pass"):
        make_timeline(trace).steps(3)


# --- overlaps ---------------------------------------------------------------------------------

ticks = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=8)


@pytest.mark.gguf
def test_llama_cpp_computes_in_a_thread_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_streaming(monkeypatch)
    path = save_tiny_gguf("llama", tmp_path / "model.gguf", hidden=256, feed_forward=512)
    with load(path, threads=1, spec_type="none", ctx_size=64) as llm:
        timeline, _ = record_run(llm, [1, 5, 6], {"max_tokens": 3, "ignore_eos": True})
    (target,) = [lane for lane in timeline.lanes if lane.group == TARGET]
    assert [e.kind for e in target.events if e.kind in (PREFILL, PASS)] == [PREFILL, PASS, PASS]
    layers = [e.name for e in target.events if e.kind == LAYER]
    assert layers == ["layer 0", "layer 1", "layer 2"] * 3


@given(ticks, ticks)
def test_common_seconds_counts_the_ticks_in_both(
    item: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    def covered(spans: list[tuple[int, int]]) -> set[int]:
        return {tick for low, high in spans for tick in range(low, high)}

    assert common_seconds(item, other) == len(covered(item) & covered(other))
    union = merged(item)
    assert sum(high - low for low, high in union) == len(covered(item))
    assert all(a[1] < b[0] for a, b in pairwise(union))


def test_what_overlapped() -> None:
    trace = Trace(10)
    for event in (
        Event(READ, "read", 0.0, 4.0, 1, 10),
        Event(READ, "read", 1.0, 6.0, 2, 10),
        Event(DRAFT, "draft", 2.0, 3.0, 3),
        Event(WAIT, "wait", 3.5, 4.0, 3),
        Event(LAYER, "layer 0", 4.0, 7.0, 3),
        Event(PASS, "pass", 3.0, 8.0, 3),
        Event(DRAFT, "draft", 5.0, 7.0, 4),
    ):
        trace.add(event)
    timeline = make_timeline(trace)
    assert [lane.title for lane in timeline.lanes] == [
        "reader 1", "reader 2", "target pass", "draft 1", "draft 2"
    ]  # fmt: skip
    whole = overlap(timeline, 0.0, 8.0)
    assert (whole.reading, whole.passing, whole.waiting, whole.drafting) == (6.0, 5.0, 0.5, 3.0)
    assert whole.drafting_beside_reads == 2.0
    assert whole.drafting_beside_passes == 2.0
    part = overlap(timeline, 5.0, 8.0)
    assert (part.seconds, part.reading, part.passing, part.drafting) == (3.0, 1.0, 3.0, 2.0)


def test_layers_lie_in_the_lane_of_what_holds_them() -> None:
    trace = Trace(10)
    for event in (
        Event(DRAFT, "draft", 0.0, 4.0, 1),
        Event(LAYER, "own thread", 1.0, 2.0, 1),
        Event(LAYER, "draft worker", 2.0, 3.0, 2),
        Event(PASS, "pass", 5.0, 9.0, 1),
        Event(DRAFT, "ahead", 5.0, 8.0, 3),
        Event(LAYER, "target worker", 6.0, 7.0, 2),
        Event(LAYER, "ahead layer", 6.0, 7.0, 3),
    ):
        trace.add(event)
    lanes = {lane.title: [e.name for e in lane.events] for lane in make_timeline(trace).lanes}
    assert lanes == {
        "target pass": ["pass", "target worker"],
        "draft": ["draft", "own thread", "draft worker"],
        "ahead": ["ahead", "ahead layer"],
    }


# --- the command ------------------------------------------------------------------------------


def test_the_command_draws_and_writes(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    force_streaming(monkeypatch)
    picture, events = tmp_path / "run.png", tmp_path / "run.json"
    argv = f"timeline -m {model} -md {model} --threads 1 -n 8 --ignore-eos --rounds 2".split()
    assert main([*argv, "-o", str(picture), "--trace", str(events)]) == 0
    out = capsys.readouterr().out
    assert "storage busy" in out
    assert "drafting" in out
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    value = json.loads(events.read_text())
    assert value["otherData"]["command"][:2] == ["specdec-bench", "timeline"]
    assert value["otherData"]["stats"]["passes"] > 0


def test_the_title_says_what_drafted_and_what_is_lossy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def note(timeline: Timeline, path: Path, *, title: str, n_steps: int) -> str:
        titles.append(title)
        return ""

    monkeypatch.setattr("bench.timeline.run.draw", note)
    monkeypatch.setattr("bench.timeline.run.check_matplotlib", lambda: None)
    argv = f"timeline -m {model} -md {model} --threads 1 -n 8 --ignore-eos"
    argv += f" --num-draft-tokens 4 -o {tmp_path / 'run.png'}"
    assert main(argv.split()) == 0
    assert main([*argv.split(), "--accept-threshold", "0.5"]) == 0
    assert all(f"draft {model.name}" in title for title in titles)
    assert ["LOSSY" in title for title in titles] == [False, True]


def test_without_matplotlib_it_says_so(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["timeline", "-m", str(model), "-o", str(tmp_path / "run.png")]) == 2
    assert "pip install 'specdec-stream[bench]'" in capsys.readouterr().err
