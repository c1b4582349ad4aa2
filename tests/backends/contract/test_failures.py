"""A failure or cancel in a pass leaves every sequence unchanged, and the next pass is right."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from alone import own
from backend_kinds import Kind, inside_a_pass
from hanging_storage import HangingStorage

from backends.contract.backend import PREFIX, BackendError
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SequenceInput
from offload.errors import SpecdecError

PROMPT = [3, 17, 5, 60, 41, 8]
N_LAYERS = 6  # more than slots, so that no pass can do without a read


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingStorage]:
    made = HangingStorage(monkeypatch)
    yield made
    made.let_go()


@pytest.fixture
def streaming(streamed: Kind, storage: HangingStorage) -> Iterator[RecoveringBackend[Any]]:
    with streamed.load(n_layers=N_LAYERS) as made:
        yield made
        storage.let_go()  # before it is closed


def extend(backend: RecoveringBackend[Any]) -> np.ndarray:
    row: np.ndarray = own(backend).extend([7, 20, 30], [PREFIX] * 3)[1]
    return row


# --- a read that does not end ---------------------------------------------------------------------


def cut_short(backend: RecoveringBackend[Any], storage: HangingStorage) -> None:
    """Cancel a pass that waits for a hanging read."""
    has_begun, is_over = threading.Event(), threading.Event()

    def cut_when_it_hangs() -> None:
        has_begun.wait()
        storage.wait_until_reached()
        while not is_over.wait(0.001):  # a cancel before the pass begins is lost
            backend.request_cancel()

    def run_pass() -> None:
        has_begun.set()
        extend(backend)

    thread = threading.Thread(target=cut_when_it_hangs)
    thread.start()
    try:
        with pytest.raises(BackendError):
            run_pass()
    finally:
        is_over.set()
        thread.join()
    assert storage.is_hanging
    assert own(backend).n_committed == len(PROMPT)


def test_a_read_that_does_not_end(
    streaming: RecoveringBackend[Any], storage: HangingStorage
) -> None:
    own(streaming).prefill(PROMPT)
    expected = extend(streaming)
    own(streaming).rollback(len(PROMPT))
    storage.hang()
    for _ in range(2):  # the same read still hangs when the next pass comes to it
        cut_short(streaming, storage)
    storage.let_go()
    assert np.array_equal(extend(streaming), expected)
    own(streaming).rollback(len(PROMPT))
    assert np.array_equal(extend(streaming), expected)


# --- in the middle of a pass ----------------------------------------------------------------------


def break_off() -> None:
    raise BackendError("broke off")


@pytest.mark.parametrize("n_before", [0, 1])
@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancel", "failure"])
def test_every_sequence_is_unchanged(kind: Kind, is_cancelled: bool, n_before: int) -> None:
    """The pass ends in its first or its second chunk."""
    n_long = kind.max_chunk + 88
    sizes: dict[str, Any] = {"max_context": 700, "num_kv_slots": 2500, "max_nodes": 16}
    with kind.load(n_layers=4, **sizes) as backend:
        other, long, tree = sequences = [backend.new_sequence() for _ in range(3)]
        for sequence in sequences:
            sequence.prefill([3, 4, 5])
        cached, _ = other.extend([6, 7], [PREFIX, 0])
        tree.extend([6, 7], [PREFIX, 0])
        batch = [SequenceInput(long, [9] * n_long), SequenceInput(tree, [8], [1])]
        action = backend.request_cancel if is_cancelled else break_off
        error = "cancelled" if is_cancelled else "broke off"
        with (
            inside_a_pass(backend, action, n_before) as seen,
            pytest.raises(SpecdecError, match=error),
        ):
            backend.forward(batch)
        assert seen == [kind.max_chunk, 89][: n_before + 1]
        assert [sequence.n_committed for sequence in sequences] == [3, 3, 3]
        assert (other.store.table.ids, tree.store.table.ids) == (tuple(cached), ())
        for sequence in sequences:
            sequence.store.check_integrity()
        other.commit(cached)
        prefixes = [[3, 4, 5, 6, 7], [3, 4, 5]]
        rows = [row_behind(kind, sizes, token_ids) for token_ids in prefixes]
        for sequence, expected in ((other, rows[0]), (long, rows[1]), (tree, rows[1])):
            sequence.prefill([9] * 40)
            assert np.array_equal(sequence.extend([8], [PREFIX])[1], expected)


def row_behind(kind: Kind, sizes: dict[str, Any], token_ids: list[int]) -> np.ndarray:
    with kind.resident.load(n_layers=4, **sizes) as alone:
        own(alone).prefill([*token_ids, *[9] * 40])
        row: np.ndarray = own(alone).extend([8], [PREFIX])[1]
        return row


def test_a_failed_recovery_is_repeated_before_the_next_pass(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kind.load(n_layers=4) as backend:
        expected = own(backend).prefill(PROMPT)
        own(backend).rollback(0)
        restart, refusals = backend._restart, [OSError("refused"), OSError("refused")]

        def restart_unless_refused() -> None:
            if refusals:
                raise refusals.pop()
            restart()

        monkeypatch.setattr(backend, "_restart", restart_unless_refused)
        with inside_a_pass(backend, break_off), pytest.raises(SpecdecError, match="broke off"):
            own(backend).prefill(PROMPT)
        with pytest.raises(OSError, match="refused"):
            own(backend).prefill(PROMPT)
        assert np.array_equal(own(backend).prefill(PROMPT), expected)


# --- wrong calls ----------------------------------------------------------------------------------


def test_a_wrong_call_changes_no_sequence(kind: Kind) -> None:
    with kind.load(n_layers=2) as backend, kind.load(n_layers=2) as stranger:
        sequences = [backend.new_sequence() for _ in range(2)]
        rows = [sequence.prefill([9, 10, 11]) for sequence in sequences]
        batch = [SequenceInput(sequences[0], [12]), SequenceInput(sequences[1], [13], [77])]
        with pytest.raises(BackendError, match="77, which is not a live node"):
            backend.forward(batch)
        with pytest.raises(ValueError, match="in the batch twice"):
            backend.forward([batch[0], batch[0]])
        with pytest.raises(ValueError, match="of another backend"):
            backend.forward([batch[0], SequenceInput(stranger.new_sequence(), [5])])
        for sequence, row in zip(sequences, rows, strict=True):
            assert sequence.n_committed == 3
            sequence.rollback(2)
            assert np.array_equal(sequence.prefill([11]), row)
        backend.close()
        with pytest.raises(BackendError, match="closed"):
            sequences[0].prefill([5])
