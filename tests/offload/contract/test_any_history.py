"""Any history of passes, cancels, faults, pinning and closing: each layer has the file's bytes for
as long as it is acquired, and nothing else is touched."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from layer_suppliers import PAGE, SuppliedLayers, WatchedReads
from streaming import wait_for_failure
from weight_files import write_weights

from offload.ring.slots import StreamerClosed
from offload.storage.direct_io import DirectFile, StorageError

SIZES = st.sampled_from([0, 1, 4095, 4096, 4097, 40_000]) | st.integers(0, 20_000)
RESUME = st.sampled_from([0, None])
"""After an error: the layer to go on with, None: the same."""


class Cancelled(Exception):
    """Raised by the caller."""


class LayerHistory(RuleBasedStateMachine):
    """One thread uses the layers of a supplier of some kind, from its opening to its end.

    `acquired` are the layers entered, with their number among those that came through the ring
    (None: resident or pinned); `expected` is the layer that may be entered inside of them.
    """

    def __init__(self, kind: type[SuppliedLayers]) -> None:
        super().__init__()
        self.kind = kind
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        sizes=st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=3)
        | st.lists(st.lists(SIZES, min_size=1, max_size=2), min_size=4, max_size=7),
        resident=st.sets(st.tuples(st.integers(0, 6), st.integers(0, 2)), max_size=6),
        n_files=st.integers(1, 3),
        padding=st.integers(1, 9000),
        options=st.fixed_dictionaries(
            {
                "n_slots": st.sampled_from([1, 1, 2, 2, 3, 8]),
                "n_readers": st.integers(1, 5),
                "read_bytes": st.sampled_from([PAGE, 3 * PAGE, 2048 * PAGE]),
                "remainder": st.integers(0, 511).map(lambda n_pages: n_pages * PAGE),
            }
        ),
        failing=st.sets(st.integers(0, 20), max_size=4),
        direct=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def write(self, sizes, resident, n_files, padding, options, failing, direct, seed) -> None:
        self.weights = write_weights(
            Path(self.folder.name),
            sizes if any(sizes) else [[0]],  # a file without tensors is not mapped
            n_files=n_files,
            padding=padding,
            resident=lambda i, j: (i, j) in resident,
        )
        self.n_layers, self.options = len(self.weights.layers), options
        self.direct, self.seed = direct, seed
        self.open(failing)

    def open(self, failing: set[int]) -> None:
        """Open a supplier, whose first reads fail in part."""
        self.reads = WatchedReads(self.seed, failing)
        storage = partial(DirectFile, read_at=self.reads, direct=self.direct)
        self.layers = self.kind(self.weights, storage=storage, **self.options)
        self.reads.layers, self.access = self.layers, self.layers.access
        self.acquired: dict[int, int | None] = {}
        self.expected: int | None = 0
        self.n_entered = self.num_to_pin = 0
        n_errors = self.layers.run_with_errors(1, None)
        self.reads.failing.clear()
        n_errors += self.layers.run_with_errors(1, None)  # what was read ahead
        assert n_errors <= self.reads.n_failed

    def teardown(self) -> None:
        if hasattr(self, "layers"):
            with self.layers:
                self.layers.close()
        self.folder.cleanup()

    # --- passes ---------------------------------------------------------------------------------

    def release_all(self) -> None:
        for index in tuple(self.acquired):
            self.leave_layer(index)

    def leave_layer(self, index: int) -> None:
        del self.acquired[index]
        self.layers.leave(index)

    @rule(n_passes=st.integers(1, 2), stop=st.none() | st.integers(0, 6))
    def run_passes(self, n_passes: int, stop: int | None) -> None:
        """Run passes; the last one may be given up before a layer."""
        self.release_all()
        before = self.access.stats.passes
        is_cut = stop is not None and stop < self.n_layers
        self.layers.run_passes(n_passes, stop if is_cut else -1)
        self.expected = stop if is_cut else 0
        assert self.access.stats.passes == before + n_passes - is_cut
        if not is_cut:
            self.layers.check_budget()
            assert self.access.num_pinned == self.num_to_pin
            assert self.access.unread_bytes == 0

    def run_a_pass(self) -> None:
        self.release_all()
        self.layers.run_passes()
        self.expected = 0

    @rule(index=st.none() | st.integers(0, 6))
    def enter(self, index: int | None) -> None:
        """Enter the next layer, or (the last pass is given up) any other one."""
        if index is not None or self.expected is None:
            self.release_all()
        index = (self.expected or 0) if index is None else index % self.n_layers
        is_read = self.access._cursor._is_read(index) and self.access.n_slots > 0
        numbers = [number for number in self.acquired.values() if number is not None]
        if is_read and self.n_entered - self.access.n_slots in numbers:
            with pytest.raises(RuntimeError, match="slots"):
                self.access.enter(index)
            self.release_all()
            self.expected = None
            return
        if index in self.acquired:  # all around, past pinned and resident layers
            return
        self.layers.enter(index)
        self.acquired[index] = self.n_entered if is_read else None
        self.n_entered += is_read
        self.expected = (index + 1) % self.n_layers

    @precondition(lambda self: self.acquired)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.leave_layer(data.draw(st.sampled_from(sorted(self.acquired))))

    @precondition(lambda self: self.acquired)
    @rule(index=st.integers(0, 6))
    def ask_out_of_order(self, index: int) -> None:
        if index < self.n_layers and index != self.expected:
            with pytest.raises(RuntimeError, match="out of order"):
                self.access.enter(index)

    @rule(index=st.integers(0, 6))
    def raise_in_a_layer(self, index: int) -> None:
        self.release_all()
        index %= self.n_layers
        before = self.access.stats.passes
        with pytest.raises(Cancelled), self.layers.layer(index):
            raise Cancelled
        self.expected = (index + 1) % self.n_layers
        assert self.access.stats.passes == before

    @rule()
    def restart(self) -> None:
        late = self.forget_all()
        self.access.restart()
        self.expected = 0
        self.check_absent()
        for index in late:  # nothing is left any more
            self.access.leave(index)

    def forget_all(self) -> list[int]:
        indexes = list(self.acquired)
        self.acquired.clear()
        self.layers.acquired.clear()
        return indexes

    # --- pinning --------------------------------------------------------------------------------

    @rule(n_layers=st.integers(0, 5), is_used=st.booleans())
    def pin(self, n_layers: int, is_used: bool) -> None:
        n_streamed = len(self.access._cursor._streamed)
        self.num_to_pin = min(n_layers, max(0, n_streamed - self.access.n_slots))
        if self.access.num_pinned > self.num_to_pin:  # some are unpinned, and all released
            self.forget_all()
            self.expected = 0
        assert self.access.set_num_pinned(n_layers) == self.num_to_pin
        if is_used:
            self.run_passes(2, None)

    # --- faults ---------------------------------------------------------------------------------

    @rule(after=st.sets(st.integers(0, 30), min_size=1, max_size=3), resume=RESUME)
    def some_reads_fail(self, after: set[int], resume: int | None) -> None:
        """Each failed read is an error once at most, and once if it is the only one."""
        self.run_a_pass()
        before, start = self.reads.n_failed, self.reads.n_calls
        self.reads.failing = {start + n for n in after}
        n_errors = self.layers.run_with_errors(3, resume)
        self.reads.failing = set()
        n_errors += self.layers.run_with_errors(1, resume)
        n_failed = self.reads.n_failed - before
        assert min(1, n_failed) <= n_errors <= n_failed
        self.layers.check_budget()

    @precondition(lambda self: self.access.n_slots)
    @rule(is_restarted=st.booleans())
    def storage_breaks(self, is_restarted: bool) -> None:
        """Every pass fails meanwhile, and none afterwards."""
        self.run_a_pass()
        self.reads.is_broken = True
        for _ in range(2):
            with pytest.raises(StorageError, match="Input/output error"):
                self.layers.run_passes(3)
        if is_restarted:
            self.access.restart()
            wait_for_failure(self.access)  # of an old read-ahead: no error of the next pass
        self.reads.is_broken = False
        self.run_a_pass()
        self.layers.check_budget()

    @contextmanager
    def hanging(self) -> Iterator[threading.Event]:
        """Let reads hang until the end of the block, or until the event."""
        go_on, fault = threading.Event(), self.reads.fault
        self.reads.fault = lambda call, length: go_on.wait() and fault(call, length)
        try:
            yield go_on
        finally:
            go_on.set()
            self.reads.fault = fault

    @rule(index=st.integers(0, 6))
    def cancel_a_wait(self, index: int) -> None:
        """The caller gives up while reads hang, unless the layer was there already."""

        def cancel() -> None:
            raise Cancelled

        self.release_all()
        with self.hanging():
            self.access.restart()
            try:
                self.access.enter(index % self.n_layers, cancel)
            except Cancelled:
                pass
            else:
                self.access.leave(index % self.n_layers)
        self.expected = None

    # --- closing --------------------------------------------------------------------------------

    @rule(is_hanging=st.booleans(), failing=st.sets(st.integers(0, 20), max_size=2))
    def close(self, is_hanging: bool, failing: set[int]) -> None:
        """Close at this moment, twice; then open anew."""
        late = self.forget_all()
        with self.layers, self.hanging() as go_on:
            if is_hanging:
                threading.Timer(0.01, go_on.set).start()
            else:
                go_on.set()
            self.layers.close()
            with pytest.raises(StreamerClosed):
                self.access.enter(0)
            for index in late:
                self.access.leave(index)
            self.access.restart()
            assert self.access.set_num_pinned(2) == 0
        self.open(failing)

    # --- at any time ----------------------------------------------------------------------------

    @invariant()
    def has_the_bytes_of_the_file(self) -> None:
        if hasattr(self, "layers"):
            self.layers.check_acquired()
            assert not self.reads.wrong
            assert self.access.num_pinned <= self.num_to_pin
            assert list(self.acquired) == list(self.layers.acquired)
            self.check_absent()

    def check_absent(self) -> None:
        for index in range(self.n_layers):
            if index not in self.acquired and index not in self.access._cursor.pinned:
                self.layers.check_absent(index)


@pytest.mark.slow_except(1)
def test_any_history(kind: type[SuppliedLayers]) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    limits = settings(
        max_examples=50, stateful_step_count=12, deadline=None, suppress_health_check=checks
    )
    run_state_machine_as_test(lambda: LayerHistory(kind), settings=limits)
