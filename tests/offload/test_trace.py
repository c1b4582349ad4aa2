"""Recordings: every byte and layer once, bounded, and off by default."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mapped_weights import mapped
from streaming import small_weights
from weight_files import write_weights

from offload import trace as tracing
from offload.paging import plan as paging_plan
from offload.paging.pager import Pager
from offload.ring.streamer import WeightStreamer
from offload.storage.aligned import ALIGNMENT
from offload.trace import LAYER, READ, WAIT, Event, Trace, record_since, recorded, recording

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
N_PASSES = 3


def check(trace: Trace, streamer: WeightStreamer | Pager, n_layers: int) -> None:
    by_kind: dict[str, list[Event]] = {READ: [], WAIT: [], LAYER: []}
    for event in trace.events:
        assert event.started <= event.ended
        by_kind[event.kind].append(event)
    stats = streamer.stats
    assert sum(e.n_bytes for e in by_kind[READ]) == stats.bytes_read > 0
    assert all(e.path is not None and e.path.is_file() for e in by_kind[READ])
    assert threading.get_ident() not in {e.thread for e in by_kind[READ]}
    assert sum(e.ended - e.started for e in by_kind[WAIT]) == pytest.approx(stats.stall_seconds)
    names = [e.name for e in by_kind[LAYER]]
    assert names == [f"layer {i}" for i in range(n_layers)] * N_PASSES


def test_a_streamer_is_recorded(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    with recording() as trace:
        with WeightStreamer(weights.layers, 2, read_bytes=ALIGNMENT, n_readers=2) as streamer:
            weights.run_passes(streamer, n_passes=N_PASSES)
        check(trace, streamer, len(weights.layers))


def test_a_pager_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging_plan, "HUGE_PAGE_BYTES", 4 * ALIGNMENT)
    weights = write_weights(tmp_path, [[60_000], [50_000, 300], [70_000]])
    with recording() as trace, mapped(weights) as files:
        with Pager(files.layers, [], files.mappings, 2, read_bytes=ALIGNMENT) as pager:
            files.run_passes(pager, n_passes=N_PASSES)
        check(trace, pager, len(weights.layers))


def test_nothing_is_stored_without_a_recording(tmp_path: Path) -> None:
    with recording() as trace:
        pass
    weights = small_weights(tmp_path)
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.run_passes(streamer, n_passes=1)
    assert trace.events == []
    assert tracing._trace is None


def test_a_recording_is_bounded() -> None:
    with recording(max_events=3) as trace:
        for number in range(5):
            record_since(time.perf_counter(), LAYER, f"layer {number}")
    assert [event.name for event in trace.events] == ["layer 0", "layer 1", "layer 2"]
    assert trace.n_dropped == 2


def test_threads_record_side_by_side() -> None:
    def work() -> None:
        for _ in range(1000):
            record_since(time.perf_counter(), LAYER, "layer")

    with recording() as trace:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(trace.events) == 4000


def test_one_recording_at_a_time_and_none_after_an_error() -> None:
    with recording(), pytest.raises(RuntimeError, match="records already"), recording():
        pass
    with pytest.raises(ValueError, match="stop"), recording():
        raise ValueError("stop")
    assert tracing._trace is None
    with recording() as trace:
        assert record_since(time.perf_counter(), WAIT, "wait") >= 0
    assert len(trace.events) == 1


def test_blocks_are_recorded_also_where_they_fail() -> None:
    @recorded(WAIT, "block")
    @contextmanager
    def block(value: int) -> Iterator[int]:
        yield value

    with recording() as trace:
        with block(3) as value:
            assert value == 3
        with pytest.raises(ValueError, match="stop"), block(4):
            raise ValueError("stop")
    assert [(e.kind, e.name) for e in trace.events] == [(WAIT, "block")] * 2
