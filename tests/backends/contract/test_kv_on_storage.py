"""A KV cache whose cold blocks are in a file: the same bits as with all of it in memory."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from alone import own
from backend_kinds import ON_STORAGE, Kind, inside_a_pass, make_kind, save
from plain_rows import Fresh
from sequence_histories import MAX_NODES, try_sequences

from backends.attention.batch import BLOCK_SIZE
from backends.contract.backend import PREFIX, BackendError, KvFileError
from backends.contract.recovery import RecoveringBackend
from backends.contract.sequence import SequenceInput
from backends.kv.tiers import TieredPool
from offload.storage import scratch_file

TEXT = np.random.default_rng(3).integers(3, 96, 1000).tolist()
N_HOT = 8
SIZES: dict[str, Any] = {"max_context": 900, "num_kv_slots": 1400, "max_nodes": 40}


def load(folder: Path, name: str = f"torch-streamed-{ON_STORAGE}", **sizes: Any) -> Any:
    return make_kind(name, folder).load(n_layers=4, **{**SIZES, "n_hot": N_HOT, **sizes})


@pytest.fixture
def backend(kind_models: Path) -> Iterator[RecoveringBackend[Any]]:
    with load(kind_models) as made:
        yield made


@pytest.fixture
def plain(kind_models: Path) -> Iterator[RecoveringBackend[Any]]:
    with make_kind("torch-resident", kind_models).load(n_layers=4, **SIZES) as made:
        yield made


def pool_of(backend: Any) -> TieredPool:
    assert isinstance(backend._pool, TieredPool)
    return backend._pool


def n_cold(backend: Any) -> int:
    return pool_of(backend)._cold.n_used


@pytest.mark.slow_except(3)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        (f"torch-streamed-{ON_STORAGE}", "llama"),
        (f"torch-resident-{ON_STORAGE} q8_0", "mistral"),
        (f"torch-resident-{ON_STORAGE}", "minicpm3"),
        (f"torch-resident-{ON_STORAGE} fp8", "bloom"),
        (f"torch-streamed-{ON_STORAGE}", "qwen3.5-bf16"),
        (f"torch-resident-{ON_STORAGE} q8_0", "minicpm3"),
    ],
)
def test_any_history_equals_a_fresh_prefill(name: str, family: str, kind_models: Path) -> None:
    kind = make_kind(name, kind_models)
    begins_anywhere = not family.startswith("qwen3.5")  # states are not kept of any length
    sizes = {"max_context": 420, "num_kv_slots": 20 * BLOCK_SIZE, "max_nodes": None}
    with (
        kind.load(family, **sizes, n_hot=7, n_kept_free=2) as backend,
        kind.resident.load(family, max_context=420) as fresh,
    ):
        try_sequences(
            backend,
            Fresh(fresh),
            depth=MAX_NODES,
            longest=130 if begins_anywhere else 280,
            max_seqs=3,
            beginning=TEXT[:150] if begins_anywhere else (),
            max_examples=8,
        )


@pytest.mark.parametrize("seed", [0, 2])
def test_a_batch_that_fits_never_raises(seed: int, kind_models: Path) -> None:
    """Prompts, trees, forks and rollbacks of more sequences than the hot blocks have ends for."""
    random = np.random.default_rng(seed)
    for n_hot in range(9, 13):
        with load(kind_models, n_hot=n_hot, n_kept_free=5, num_kv_slots=4000) as backend:
            sequences = [backend.new_sequence() for _ in range(6)]
            n_passes = sum(a_pass_that_fits(backend, sequences, random) for _ in range(25))
            assert n_passes >= 8
            assert n_cold(backend) > 0


def a_pass_that_fits(backend: Any, sequences: list[Any], random: np.random.Generator) -> bool:
    """Run a pass over random inputs of some sequences, if it fits; return whether it does."""
    batch: list[SequenceInput] = []
    for i in random.permutation(len(sequences))[: random.integers(1, len(sequences) + 1)]:
        if random.random() < 0.1 and sequences[i].n_committed:
            sequences[i - 1].close()
            sequences[i - 1] = sequences[i].fork(int(random.integers(1, sequences[i].n_committed)))
            batch = [added for added in batch if not added.kv.is_closed]
        sequence = sequences[i]
        if sequence.n_committed > 650:
            sequence.rollback(int(random.integers(300)))
        if random.random() < 0.5 or not sequence.n_committed:
            batch.append(SequenceInput(sequence, TEXT[: random.integers(1, 200)]))
        else:
            n_nodes = int(random.integers(1, 10))
            batch.append(SequenceInput(sequence, TEXT[:n_nodes], [PREFIX] * n_nodes))
    if backend.n_fitting(batch) < len(batch):
        for sequence in sequences:
            sequence.prune([x for x in sequence.store.table.ids if random.random() < 0.5])
        return False
    outputs = backend.forward(batch)
    for added, output in zip(batch, outputs, strict=True):
        if added.parents is not None and random.random() < 0.7:
            added.kv.commit(output.node_ids[:1])
    return True


def conversation(backend: RecoveringBackend[Any]) -> list[np.ndarray]:
    """Return rows of a long prompt, trees, commits, a fork, a rollback into cold blocks."""
    actual = [own(backend).prefill(TEXT[:700])]
    for at in (700, 720):
        first = own(backend).next_node_id
        parents = [p if p == PREFIX else first + p for p in (PREFIX, 0, 0, 1, 2, PREFIX)]
        actual.append(own(backend).extend(TEXT[at : at + 6], parents)[1])
        own(backend).commit([first, first + 2, first + 4])
        actual.append(own(backend).prefill(TEXT[at + 6 : at + 20]))
    fork = own(backend).fork(330)
    actual.append(fork.prefill(TEXT[5:50]))
    batch = [SequenceInput(fork, [9] * 4, [PREFIX] * 4), SequenceInput(own(backend), [8] * 70)]
    actual += [output.logits for output in backend.forward(batch)]
    fork.close()
    own(backend).rollback(100)
    actual.append(own(backend).prefill(TEXT[100:400]))
    return actual


@pytest.mark.parametrize("how", ["streamed", "resident"])
def test_where_the_kv_is_decides_nothing(
    how: str, kind_models: Path, plain: RecoveringBackend[Any]
) -> None:
    with load(kind_models, f"torch-{how}-{ON_STORAGE}") as backend:
        pairs = zip(conversation(plain), conversation(backend), strict=True)
        assert [np.array_equal(*pair) for pair in pairs] == [True] * 9
        assert n_cold(backend) > 0


def test_a_slow_file_changes_no_bit(
    backend: RecoveringBackend[Any],
    plain: RecoveringBackend[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is used before it was read, or overwritten before it was written."""
    for what in ("pread_into", "pwrite_from"):
        actual = getattr(scratch_file, what)

        def transfer(*where: Any, actual: Any = actual) -> int:
            time.sleep(0.005)
            return int(actual(*where))

        monkeypatch.setattr(scratch_file, what, transfer)
    pairs = zip(conversation(plain), conversation(backend), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


def test_a_prompt_longer_than_memory_is_written_once_and_not_read(
    backend: RecoveringBackend[Any],
) -> None:
    own(backend).prefill(TEXT[:800])
    stats = backend.transfer_stats
    block_bytes = sum(pool_of(backend)._file.block_bytes)
    assert stats.kv_bytes_read == 0
    assert n_cold(backend) * block_bytes <= stats.kv_bytes_written <= 13 * block_bytes
    for n_read in (1, 2):  # every pass reads the cold blocks once
        own(backend).extend([7, 8, 9], [PREFIX] * 3)
        assert backend.transfer_stats.kv_bytes_read == n_read * n_cold(backend) * block_bytes


def test_a_pass_reads_the_blocks_of_its_own_sequences(backend: RecoveringBackend[Any]) -> None:
    own(backend).prefill(TEXT[:600])
    other = backend.new_sequence()
    other.prefill(TEXT[600:620])
    before = backend.transfer_stats.kv_bytes_read
    other.prefill([5])
    assert backend.transfer_stats.kv_bytes_read == before


def test_a_saved_prefix_is_that_of_a_cache_in_memory(
    backend: RecoveringBackend[Any], plain: RecoveringBackend[Any]
) -> None:
    for made in (backend, plain):
        own(made).prefill(TEXT[:500])
    saved, expected = save(own(backend)), save(own(plain))
    assert saved.keys() == expected.keys()
    for name, (tensor, view) in expected.items():
        assert (saved[name][0], bytes(saved[name][1])) == (tensor, bytes(view))
    row = own(plain).prefill([7])
    other = backend.new_sequence()
    other.load_prefix(TEXT[:500], expected)
    assert np.array_equal(other.prefill([7]), row)
    assert np.array_equal(own(backend).prefill([7]), row)


def test_memory_stays_within_the_hot_blocks_and_two_layers(
    backend: RecoveringBackend[Any],
) -> None:
    before = backend.kv_bytes
    bound = backend.kv_growth_bytes(800)
    own(backend).prefill(TEXT[:800])
    file = pool_of(backend)._file
    staged = 2 * n_cold(backend) * file.max_block_bytes
    assert 0 < backend.kv_bytes <= N_HOT * sum(file.block_bytes) + staged + 2 * 4096
    assert backend.kv_bytes - before <= bound
    own(backend).rollback(0)
    backend.release_unused_kv()
    assert backend.kv_bytes == 0


def test_full_blocks_are_written_before_their_memory_is_needed(
    backend: RecoveringBackend[Any],
) -> None:
    """With no file write in a pass's way: after each pass a hot block is free, or being written."""
    pool = pool_of(backend)
    for at in range(0, 640, 16):
        own(backend).prefill(TEXT[at : at + 16])
        assert pool._hot.n_free + len(pool._spills) >= 1
    assert n_cold(backend) >= 10 - N_HOT


# --- failures -------------------------------------------------------------------------------------


def fail_with(monkeypatch: pytest.MonkeyPatch, what: str, number: int, n_before: int = 0) -> None:
    """Let transfers of the KV file fail, after `n_before` that succeed."""
    actual, seen = getattr(scratch_file, what), []

    def transfer(*where: Any) -> int:
        seen.append(where)
        if len(seen) > n_before:
            raise OSError(number, os.strerror(number))
        return int(actual(*where))

    monkeypatch.setattr(scratch_file, what, transfer)


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_a_failed_read_names_its_sequence_and_leaves_the_others(
    n_before: int,
    backend: RecoveringBackend[Any],
    plain: RecoveringBackend[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own(backend).prefill(TEXT[:600])
    other = backend.new_sequence()
    other.prefill(TEXT[600:700])
    with monkeypatch.context() as patch:
        fail_with(patch, "pread_into", errno.EIO, n_before)
        batch = [SequenceInput(own(backend), [7]), SequenceInput(other, [7])]
        with pytest.raises(KvFileError, match="cannot be read: Input/output error") as caught:
            backend.forward(batch)
        assert list(caught.value.stores) == [own(backend).store]
        own(plain).prefill(TEXT[600:700])
        assert np.array_equal(other.prefill([7]), own(plain).prefill([7]))
    own(plain).rollback(0)
    own(plain).prefill(TEXT[:600])
    assert np.array_equal(own(backend).prefill([7]), own(plain).prefill([7]))


@pytest.mark.parametrize("n_before", [0, 1, 3])
def test_a_full_disk_ends_the_sequence_that_needs_memory(
    n_before: int,
    backend: RecoveringBackend[Any],
    plain: RecoveringBackend[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other, long = backend.new_sequence(), backend.new_sequence()
    other.prefill(TEXT[600:700])
    with monkeypatch.context() as patch:
        fail_with(patch, "pwrite_from", errno.ENOSPC, n_before)
        with pytest.raises(
            KvFileError, match="No space left on device: free space there"
        ) as caught:
            long.prefill(TEXT[:600])
        assert list(caught.value.stores) == [long.store]
        assert long.n_committed == 0
        own(plain).prefill(TEXT[600:700])
        assert np.array_equal(other.prefill([7]), own(plain).prefill([7]))
    own(plain).rollback(0)
    assert np.array_equal(long.prefill(TEXT[:600]), own(plain).prefill(TEXT[:600]))


def fill_memory(backend: RecoveringBackend[Any]) -> None:
    """Compute as many tokens as the hot blocks hold, and end all writes in the background."""
    for at in range(0, N_HOT * BLOCK_SIZE, 16):
        own(backend).prefill(TEXT[at : at + 16])
        wait(spill.job for spill in pool_of(backend)._spills.values())


@pytest.mark.parametrize("n_kept_free", [1, 5])
def test_a_block_that_could_not_be_written_stays(
    n_kept_free: int,
    kind_models: Path,
    plain: RecoveringBackend[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk fails what needs memory that is not there, and nothing before."""
    with load(kind_models, n_kept_free=n_kept_free) as backend:
        with monkeypatch.context() as patch:
            fail_with(patch, "pwrite_from", errno.ENOSPC)
            fill_memory(backend)
            with pytest.raises(KvFileError, match="cannot be written: No space left"):
                own(backend).prefill(TEXT[512:600])
        assert own(backend).n_committed == 512
        own(plain).prefill(TEXT[:512])
        rows = [own(made).prefill(TEXT[512:600]) for made in (backend, plain)]
        assert np.array_equal(*rows)


def test_a_write_that_found_no_memory_takes_no_space_in_the_file(
    backend: RecoveringBackend[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(backend)

    def write(hot: int, cold: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pool._mover, "write", write)
        fill_memory(backend)
        assert pool._spills
        with pytest.raises(MemoryError):
            own(backend).prefill(TEXT[512:600])
    own(backend).rollback(0)
    assert pool._cold.n_used == 0


def test_a_pass_cut_short_leaves_the_next_one_right(
    backend: RecoveringBackend[Any], plain: RecoveringBackend[Any]
) -> None:
    own(backend).prefill(TEXT[:600])
    own(plain).prefill(TEXT[:600])
    with inside_a_pass(backend, backend.request_cancel), pytest.raises(BackendError):
        own(backend).prefill(TEXT[600:890])
    assert np.array_equal(own(backend).prefill([7]), own(plain).prefill([7]))


@contextmanager
def cancelled_in_layer_0(backend: RecoveringBackend[Any]) -> Iterator[None]:
    """Cancel the pass when its first layer is about to wait for cold blocks."""
    staging = pool_of(backend)._staging
    acquire = staging.acquire

    def cancel_and_acquire(layer: int, check: Any) -> Any:
        backend.request_cancel()
        return acquire(layer, check)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "acquire", cancel_and_acquire)
        with pytest.raises(BackendError, match="cancelled"):
            yield


def test_a_pass_cancelled_behind_a_slow_write_leaves_no_read_behind(
    backend: RecoveringBackend[Any],
    plain: RecoveringBackend[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that is in the queue when layer 0 is cancelled fills no buffer of the next pass."""
    own(backend).prefill(TEXT[:700])
    staging, is_computed = pool_of(backend)._staging, Event()
    release = staging.release
    staging.submit(lambda: [is_computed.wait(60)].clear())

    with cancelled_in_layer_0(backend):
        own(backend).prefill([7])

    def note_and_release(layer: int) -> None:
        is_computed.set()  # layer 0 has written its rows to the buffer
        release(layer)

    monkeypatch.setattr(staging, "release", note_and_release)
    own(backend).rollback(0)
    for token_ids in (TEXT[200:900], [9]):
        assert np.array_equal(own(backend).prefill(token_ids), own(plain).prefill(token_ids))


def test_nothing_of_a_cancelled_pass_fills_memory_that_was_given_back(
    backend: RecoveringBackend[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own(backend).prefill(TEXT[:700])
    staging = pool_of(backend)._staging
    read = scratch_file.pread_into

    def read_slowly(*where: Any) -> int:
        time.sleep(0.1)
        return int(read(*where))

    monkeypatch.setattr(scratch_file, "pread_into", read_slowly)
    with cancelled_in_layer_0(backend):
        own(backend).prefill([7])
    own(backend).rollback(0)
    backend.release_unused_kv()
    n_read = backend.transfer_stats.kv_bytes_read
    staging.submit(int).result()  # after all that the thread has to do
    assert backend.transfer_stats.kv_bytes_read == n_read
    assert backend.kv_bytes == 0


def test_no_file_is_left(kind_models: Path) -> None:
    kind = Kind(f"torch-resident-{ON_STORAGE}", kind_models)
    kind.model(n_layers=4)
    n_open = len(os.listdir("/proc/self/fd"))
    names = set(os.listdir(kind_models))
    with load(kind_models) as backend:
        own(backend).prefill(TEXT[:600])
        assert n_cold(backend) > 0
        assert set(os.listdir(kind_models)) == names
    assert len(os.listdir("/proc/self/fd")) <= n_open
