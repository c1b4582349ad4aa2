"""A cache of experts over a real file always returns the file's bytes."""

from __future__ import annotations

import gc
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from weight_files import HangingFile

from offload.errors import SpecdecError
from offload.experts import readers as readers_file
from offload.experts.cache import ExpertCache
from offload.experts.cached import expected_decay, keep_decay
from offload.experts.eviction import visits_of
from offload.experts.readers import ExpertStats
from offload.formats.tensors import TensorRecord
from offload.placement.experts import ASSUMED_DECAY, ExpertCachePlan, LayerExperts
from offload.storage.direct_io import DirectFile, StorageError
from offload.trace import recording

N_LAYERS, N_EXPERTS = 3, 6
SIZES = (5000, 3001, 9000)  # gate, up and down: adjacent, unaligned


class Written:
    """A file of experts, each behind a gap, and the contents of every tensor."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        self.bytes: dict[tuple[int, int], list[bytes]] = {}
        content, layers = bytearray(b"header "), []
        for layer in range(N_LAYERS):
            experts = []
            for expert in range(N_EXPERTS):
                content += bytes(100_000)
                records, parts = [], []
                for part, size in enumerate(SIZES):
                    data = rng.bytes(size)
                    name = f"{layer}.{expert}.{part}"
                    records.append(TensorRecord(name, "U8", (size,), path, len(content), size))
                    content += data
                    parts.append(data)
                experts.append(tuple(records))
                self.bytes[layer, expert] = parts
            layers.append(LayerExperts(tuple(experts), 2))
        path.write_bytes(content)
        self.layers = tuple(layers)
        self.path = path

    def expert_cache(self, n_slots: int) -> ExpertCachePlan:
        return ExpertCachePlan(self.layers, n_slots)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "experts.bin")


@pytest.fixture
def cache(written: Written) -> Iterator[ExpertCache]:
    made = ExpertCache(written.expert_cache(4))
    yield made
    made.close()


def check(cache: ExpertCache, written: Written, layer: int, experts: list[int]) -> None:
    actual = []
    for expert, tensors in cache.fetch(layer, experts):
        assert [bytes(x) for x in tensors] == written.bytes[layer, expert]
        actual.append(expert)
    assert sorted(actual) == sorted(experts)


def test_every_expert_is_the_files_own_bytes(written, cache) -> None:
    rng = np.random.default_rng(1)
    for step in range(30):
        experts = rng.choice(N_EXPERTS, int(rng.integers(1, N_EXPERTS + 1)), replace=False)
        check(cache, written, step % N_LAYERS, experts.tolist())


def test_what_is_there_is_not_read_again(written, cache) -> None:
    check(cache, written, 0, [1, 2])
    before = cache.stats.bytes_read
    assert before >= 2 * sum(SIZES)
    check(cache, written, 0, [2, 1])
    assert cache.stats.bytes_read == before
    assert (cache.stats.n_hits, cache.stats.n_asked) == (2, 4)


def test_neighbouring_tensors_are_one_read(written) -> None:
    assert all(len(layout.extents) == 1 for layer in written.layers for layout in layer.layouts)


def test_expert_hit_rates_are_cached_for_the_next_plan(written) -> None:
    expert_cache = written.expert_cache(9)  # half of all experts
    assert expected_decay(written.layers) == ASSUMED_DECAY
    keep_decay(expert_cache, ExpertStats(n_asked_full=10, n_hits_full=9))  # too few to tell
    assert expected_decay(written.layers) == ASSUMED_DECAY
    keep_decay(expert_cache, ExpertStats(n_asked_full=4000, n_hits_full=3000))
    assert expected_decay(written.layers) == pytest.approx(2 * math.log(4))
    assert ExpertCachePlan(written.layers, 9, 2 * math.log(4)).hit_rate == pytest.approx(0.75)
    keep_decay(written.expert_cache(18), ExpertStats(n_asked_full=4000, n_hits_full=4000))
    assert expected_decay(written.layers) == pytest.approx(
        2 * math.log(4)
    )  # all are cached: nothing to learn


def test_it_is_not_that_of_another_file_in_its_place(written) -> None:
    keep_decay(written.expert_cache(9), ExpertStats(n_asked_full=4000, n_hits_full=3000))
    status = written.path.stat()
    os.utime(written.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert expected_decay(written.layers) == ASSUMED_DECAY
    written.path.unlink()
    keep_decay(written.expert_cache(9), ExpertStats(n_asked_full=4000, n_hits_full=3000))


def test_what_is_counted_for_it_begins_when_the_cache_is_full(written, cache) -> None:
    check(cache, written, 0, [0, 1])
    assert cache.stats.n_asked_full == 0
    check(cache, written, 1, [0, 1])
    check(cache, written, 1, [0, 1])
    assert (cache.stats.n_asked_full, cache.stats.n_hits_full) == (2, 2)


def test_passes_of_several_tokens_are_not_counted_for_it(written, cache) -> None:
    """Such passes share experts, which are mostly cached: the remaining ones miss more often."""
    for layer in (0, 1, 1):
        check(cache, written, layer, [0, 1])
    before = cache.stats.n_asked_full
    check(cache, written, 1, [0, 1, 2])
    assert cache.stats.n_asked_full == before > 0


def test_one_slot_is_enough(written) -> None:
    cache = ExpertCache(written.expert_cache(1))
    check(cache, written, 0, list(range(N_EXPERTS)))
    check(cache, written, 1, list(range(N_EXPERTS)))
    cache.close()


def test_a_pass_that_ends_early_leaves_whole_experts_only(written, cache) -> None:
    fetched = cache.fetch(0, [0, 1, 2, 3])
    next(fetched)
    fetched.close()
    check(cache, written, 0, [0, 1, 2, 3])
    check(cache, written, 1, [4, 5])


def test_a_trace_has_what_was_asked_for(written) -> None:
    cache = ExpertCache(written.expert_cache(4))
    with recording() as trace:
        check(cache, written, 2, [5, 1])
    cache.close()
    assert visits_of(trace) == [(2, (1, 5))]


class FailingFile(DirectFile):
    """A disk that fails once, at the second read."""

    n_reads = 0

    def read_into(self, view: memoryview, offset: int) -> int:
        FailingFile.n_reads += 1
        if FailingFile.n_reads == 2:
            raise StorageError(f"{self.path}: I/O error")
        return super().read_into(view, offset)


def test_what_a_failed_read_raised_keeps_no_memory(written) -> None:
    FailingFile.n_reads = 0
    cache = ExpertCache(written.expert_cache(4), storage=FailingFile, n_readers=1)
    gc.disable()  # the collector would find the memory sooner or later
    try:
        with pytest.raises(StorageError, match="I/O error"):
            list(cache.fetch(0, [0, 1, 2]))
        freed = weakref.ref(cache)
        cache.close()
        del cache
        assert freed() is None
    finally:
        gc.enable()


def test_a_failed_read_is_reported_and_repeated(written) -> None:
    FailingFile.n_reads = 0
    cache = ExpertCache(written.expert_cache(4), storage=FailingFile, n_readers=1)
    with pytest.raises(StorageError, match="I/O error"):
        check(cache, written, 0, [0, 1, 2])
    check(cache, written, 0, [0, 1, 2])
    cache.close()


def test_a_check_that_raises_ends_the_wait(written, cache) -> None:
    class Cancelled(Exception):
        pass

    def cancel() -> None:
        raise Cancelled

    hanging = ExpertCache(written.expert_cache(4), storage=SlowFile)
    with pytest.raises(Cancelled):
        list(hanging.fetch(0, [0, 1], cancel))
    check(hanging, written, 0, [0, 1])
    hanging.close()


@pytest.fixture
def hanging(written: Written) -> Iterator[ExpertCache]:
    HangingFile.let_go.clear()
    made = ExpertCache(written.expert_cache(4), storage=HangingFile)
    yield made
    HangingFile.let_go.set()
    made.close()


def test_an_access_ends_while_its_reads_hang(written, hanging) -> None:
    """The next access waits for the reads and their slots, and ends as well."""

    def cancel() -> None:
        raise KeyError("cancelled")

    for layer in (0, 0, 1):
        with pytest.raises(KeyError, match="cancelled"):
            list(hanging.fetch(layer, [0, 1], cancel))
    HangingFile.let_go.set()
    for layer in range(N_LAYERS):
        check(hanging, written, layer, [0, 1, 2, 3, 4])


def test_what_is_there_is_handed_out_while_the_rest_is_read(written, hanging) -> None:
    HangingFile.let_go.set()
    check(hanging, written, 0, [0, 1])
    HangingFile.let_go.clear()
    fetched = hanging.fetch(0, [3, 1, 2, 0])
    before = hanging.stats.bytes_read
    assert [next(fetched)[0], next(fetched)[0]] == [1, 0]
    assert hanging.stats.bytes_read == before
    HangingFile.let_go.set()
    assert [expert for expert, _ in fetched] == [2, 3]


def test_reads_that_were_given_up_count(written, hanging) -> None:
    def cancel() -> None:
        raise KeyError("cancelled")

    with pytest.raises(KeyError, match="cancelled"):
        list(hanging.fetch(0, [0, 1], cancel))
    HangingFile.let_go.set()
    check(hanging, written, 0, [0, 1])  # both were read by then
    reads = [extent.n_bytes for x in written.layers[0].layouts[:2] for extent in x.extents]
    assert (hanging.stats.bytes_read, hanging.stats.n_hits) == (sum(reads), 2)


def test_closing_during_an_access_ends_it_in_one_line(written) -> None:
    cache = ExpertCache(written.expert_cache(1))
    fetched = cache.fetch(0, [0, 1])
    next(fetched)
    cache.close()
    with pytest.raises(SpecdecError, match="the model was closed"):
        next(fetched)


def test_so_does_closing_where_all_experts_are_there(written, cache) -> None:
    check(cache, written, 0, [0, 1])
    fetched = cache.fetch(0, [0, 1])
    next(fetched)
    cache.close()
    with pytest.raises(SpecdecError, match="the model was closed"):
        next(fetched)


def test_a_read_that_never_returns_does_not_block_closing(
    hanging, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fetched = hanging.fetch(0, [0], hanging.stop)
    with pytest.raises(SpecdecError, match="closed"):
        next(fetched)
    monkeypatch.setattr(readers_file, "JOIN_SECONDS", 0.01)
    hanging.close()
    assert "does not return; its memory is not freed" in caplog.text


class SlowFile(DirectFile):
    """A file whose reads take longer than the waiter's polling interval."""

    def read_into(self, view: memoryview, offset: int) -> int:
        import time

        time.sleep(0.05)
        return super().read_into(view, offset)


def test_a_closed_cache_says_so(written) -> None:
    cache = ExpertCache(written.expert_cache(4))
    cache.close()
    cache.close()
    with pytest.raises(SpecdecError, match="closed"):
        list(cache.fetch(0, [0]))


def test_a_file_that_was_overwritten_is_noticed_in_the_last_layer(written, cache) -> None:
    written.path.write_bytes(written.path.read_bytes() + b"more")
    check(cache, written, 0, [5])
    with pytest.raises(StorageError, match="was changed while in use"):
        check(cache, written, N_LAYERS - 1, [5])


def test_a_file_that_was_cut_is_noticed(written, cache) -> None:
    with written.path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(StorageError):
        check(cache, written, 0, [5])
