"""The memory of the pager's slots."""

from __future__ import annotations

import threading

import pytest
from mapped_weights import memory_in
from system_probes import needs_populated_memory

from offload.paging import memory
from offload.paging.memory import PageMemory
from offload.storage.aligned import HUGE_PAGE_BYTES, PAGE_BYTES

N_BYTES = 2 * HUGE_PAGE_BYTES


@needs_populated_memory
def test_a_slot_takes_memory_when_it_is_first_filled() -> None:
    slot = PageMemory(N_BYTES, PAGE_BYTES)
    assert memory_in([(slot.address, N_BYTES + PAGE_BYTES)]) == 0
    assert bytes(slot.view[-1:]) == b"\0"
    assert memory_in([(slot.address, N_BYTES + PAGE_BYTES)]) == N_BYTES + PAGE_BYTES
    slot.close()


def test_several_readers_commit_a_slot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    committed: list[int] = []
    commit = memory.commit
    monkeypatch.setattr(
        memory, "commit", lambda *given, **how: (committed.append(given[1]), commit(*given, **how))
    )
    slot = PageMemory(N_BYTES, 0)
    readers = [threading.Thread(target=lambda: slot.view) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert committed == [N_BYTES]
    slot.close()


def test_memory_that_cannot_be_had_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slot = PageMemory(N_BYTES, 0)

    def fail(*_: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as failing:
        failing.setattr(memory, "commit", fail)
        with pytest.raises(MemoryError, match="none left"):
            slot.commit()
    assert len(slot.view) == N_BYTES
    slot.close()
