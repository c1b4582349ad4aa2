"""Recurrent states: planned bytes are those that are kept, and hardly more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import HYBRIDS

from backends.contract.backend import PREFIX
from backends.contract.kv_files import KvFiles
from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput, SequenceKV
from backends.contract.source import BackendOptions
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from backends.recurrent import memory
from backends.recurrent.delta_by_numba import CompiledDeltaRule
from backends.recurrent.passes import RecurrentPass
from backends.recurrent.timing import binary_tree

N_NODES = 24


class Peak:
    """Largest number of bytes that passes kept, old and new states together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_bytes = self.last_bytes = 0
        succeed = memory.StateMemory.succeed

        def noted(own: memory.StateMemory, states: memory.States, of_pass: RecurrentPass) -> None:
            succeed(own, states, of_pass)
            self.last_bytes = own._peak_bytes
            self.n_bytes = max(self.n_bytes, self.last_bytes)

        monkeypatch.setattr(memory.StateMemory, "succeed", noted)


def decode(backend: TorchBackend, kvs: list[SequenceKV], n_nodes: int) -> None:
    """Run a chain in each sequence in one pass, and commit half of it."""
    batch = []
    for kv in kvs:
        first = kv.next_node_id
        parents = [PREFIX, *range(first, first + n_nodes - 1)]
        batch.append(SequenceInput(kv, [7] * n_nodes, parents))
    for kv, output in zip(kvs, backend.forward(batch), strict=True):
        kv.commit(output.node_ids[: n_nodes // 2])


def in_memory(source: HfSource, max_nodes: int) -> TorchBackend:
    return TorchBackend.kept_in_memory(source.model, max_nodes=max_nodes, num_kv_slots=4096)


def growth_bytes(backend: TorchBackend) -> int:
    return backend.kv_growth_bytes(sum(x.store.table.n_committed for x in backend._sequences))


@pytest.mark.parametrize(("family", "n_sequences"), [("lfm2", 1), *((x, 3) for x in HYBRIDS)])
def test_planned_bytes_are_enough_and_not_too_many(
    family: str, n_sequences: int, checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    peak = Peak(monkeypatch)
    source = HfSource(checkpoint_factory(family), BackendOptions())
    with in_memory(source, N_NODES) as backend:
        cache = PrefixCache(backend, n_sequences)
        for turn in range(3):
            prompts = [[5 + i] * (20 * (turn + 1)) for i in range(n_sequences)]
            kvs = [cache.allocate(prompt) for prompt in prompts]
            for kv, prompt in zip(kvs, prompts, strict=True):
                kv.prefill(prompt[kv.n_committed :])
            for _ in range(3):
                kv_bytes, expected = backend.kv_bytes, peak.last_bytes + growth_bytes(backend)
                decode(backend, kvs, N_NODES // n_sequences)
                assert peak.last_bytes + backend.kv_bytes - kv_bytes <= expected
            for kv in kvs:
                cache.release(kv)
    planned = source.state_bytes(n_sequences, N_NODES)
    n_fed = source.model.fed_bytes_per_token
    assert peak.n_bytes <= planned
    # The rest: a prompt's tail may be twice as long, and a cached path as long.
    tails = n_sequences * n_fed * 3 * 32
    assert planned - tails <= peak.n_bytes + 2 * N_NODES * n_fed


def test_a_sequence_that_rolls_back_goes_on_and_one_that_finishes_does_not(
    checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that was cut short rolls its sequences back: layers must not take their memory."""
    peak, source = Peak(monkeypatch), HfSource(checkpoint_factory("qwen3.5"), BackendOptions())
    with in_memory(source, 6) as backend:
        cache = PrefixCache(backend, 3)
        kvs = [cache.allocate([5 + i]) for i in range(3)]
        for kv in kvs:
            kv.prefill([5] * 20)
        decode(backend, kvs, 2)
        for kv in kvs:
            kv.rollback(kv.n_committed)
        decode(backend, kvs[:1], 2)
        kv_bytes, expected = backend.kv_bytes, peak.last_bytes + growth_bytes(backend)
        decode(backend, kvs, 2)
        assert peak.last_bytes + backend.kv_bytes - kv_bytes <= expected
        for kv in kvs:
            cache.release(kv)
        assert [kv.store.recurrent.num_to_make for kv in kvs] == [0, 0, 0]


def test_layers_leave_room_for_the_walk_through_a_tree(
    checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has several states of one layer at a time, and a chain one."""
    peak, walks = Peak(monkeypatch), [0]
    walk = CompiledDeltaRule._walk

    def noted(*args: Any) -> Any:
        stack, output = walk(*args)
        walks.append(stack.nbytes)
        return stack, output

    monkeypatch.setattr(CompiledDeltaRule, "_walk", noted)
    source = HfSource(checkpoint_factory("qwen3.5"), BackendOptions())
    with in_memory(source, N_NODES) as backend:
        kv = backend.new_sequence()
        kv.prefill([5] * 20)
        for _ in range(2):
            decode(backend, [kv], N_NODES)
        before = peak.last_bytes + backend.kv_bytes + walks[-1]
        expected = before + growth_bytes(backend)
        first = kv.next_node_id
        kv.extend([7] * N_NODES, [first + x if x >= 0 else PREFIX for x in binary_tree(N_NODES)])
        assert walks[-1] > 2 * source.model.largest_state_bytes
        assert peak.last_bytes + backend.kv_bytes + walks[-1] <= expected


def test_dropped_beams_take_no_memory(checkpoint_factory) -> None:
    """Two of the eight nodes of each pass go on; nothing is committed."""
    source = HfSource(checkpoint_factory("qwen3.5"), BackendOptions())
    with TorchBackend.resident(source.path) as backend:
        kv = backend.new_sequence()
        kv.prefill([5] * 20)
        n_states, n_fed = backend.state_bytes, source.model.fed_bytes_per_token
        ends = [PREFIX, PREFIX]
        for _ in range(20):
            parents = [end for end in ends for _ in range(4)]
            ids, _ = kv.extend([7, 8, 9, 10] * 2, parents)
            kv.prune([node for i, node in enumerate(ids) if i % 4])
            ends = ids[::4]
        assert len(kv.store.table) == 40
        assert backend.state_bytes <= n_states + 2 * (40 + 8) * n_fed


def test_states_do_not_grow_with_the_context(checkpoint_factory) -> None:
    source = HfSource(checkpoint_factory("qwen3.5"), BackendOptions())
    with TorchBackend.resident(source.path) as backend:
        kv = backend.new_sequence()
        kv.prefill([5] * 40)
        n_bytes = backend.state_bytes
        kv.prefill([6] * 40)
        assert backend.state_bytes == n_bytes > 0
        other = kv.fork()
        assert backend.state_bytes == n_bytes  # shared
        kv.close()
        other.close()
        assert backend.state_bytes == 0


def test_a_swapped_sequence_can_return_to_the_same_lengths(
    checkpoint_factory, tmp_path: Path
) -> None:
    source = HfSource(checkpoint_factory("qwen3.5"), BackendOptions())
    with TorchBackend.resident(source.path) as backend:
        kv, other = backend.new_sequence(), backend.new_sequence()
        kv.prefill([5, *range(10, 50)])
        decode(backend, [kv], 8)
        decode(backend, [kv], 8)
        files = KvFiles(backend, lambda: tmp_path)
        file = files.write(kv)
        assert file is not None
        assert file.load(other)
        file.close()
        lengths = range(kv.n_committed + 1)
        assert [*map(other.restorable, lengths)] == [*map(kv.restorable, lengths)]
        assert kv.restorable(kv.n_committed) == kv.n_committed
        assert kv.restorable(41) == 41  # the prompt's end, and shortly before it
        assert kv.restorable(30) == 30
        assert kv.restorable(20) == 0
        for length in (45, 41, 33):
            ends = [item.fork(kv.restorable(length)) for item in (kv, other)]
            rows = [item.prefill([3]) for item in ends]
            assert (rows[0] == rows[1]).all()
