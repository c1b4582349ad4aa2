"""The budget's arithmetic and its error."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.budget import BudgetExceeded, MemoryBudget
from offload.units import GIB, MIB, parse_bytes


def test_parts_sum_to_the_total() -> None:
    budget = MemoryBudget(4 * GIB, base_bytes=GIB, headroom_bytes=256 * MIB)
    budget.reserve("ring", 600 * MIB)
    budget.reserve("kv", 100 * MIB)
    assert budget.available_bytes == 4 * GIB - GIB - 956 * MIB
    table = budget.table()
    assert [name for name, _ in table] == ["base", "headroom", "ring", "kv", "available"]
    assert sum(n_bytes for _, n_bytes in table) == 4 * GIB


def test_release_frees_once() -> None:
    budget = MemoryBudget(100)
    first = budget.reserve("a", 60)
    second = budget.reserve("a", 40)  # names need not be unique
    first.release()
    first.release()
    assert budget.available_bytes == 60
    assert (second.name, second.n_bytes) == ("a", 40)
    with budget.reserve("b", 60):
        assert budget.available_bytes == 0
    assert budget.available_bytes == 60


def test_exceeding_names_who_how_much_and_the_remedy() -> None:
    budget = MemoryBudget(GIB, base_bytes=512 * MIB)
    budget.reserve("draft model", 256 * MIB)
    with pytest.raises(BudgetExceeded) as caught:
        budget.reserve("ring", 300 * MIB)
    error = caught.value
    assert (error.name, error.requested_bytes, error.left_bytes) == ("ring", 300 * MIB, 256 * MIB)
    assert error.smallest_budget_bytes == (512 + 256 + 300) * MIB
    for part in ("ring", "300.00 MiB", "256.00 MiB", "1068 MiB"):
        assert part in str(error)
    assert "\n" not in str(error)
    assert budget.available_bytes == 256 * MIB  # nothing is reserved


@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_the_printed_smallest_budget_is_enough(total: int, requested: int) -> None:
    budget = MemoryBudget(total)
    try:
        budget.reserve("x", requested)
    except BudgetExceeded as error:
        printed = str(error).rsplit(" is ", 1)[1]
        MemoryBudget(parse_bytes(printed)).reserve("x", requested)
        MemoryBudget(error.smallest_budget_bytes).reserve("x", requested)
        with pytest.raises(BudgetExceeded):
            MemoryBudget(error.smallest_budget_bytes - 1).reserve("x", requested)


def test_base_alone_may_exceed() -> None:
    with pytest.raises(BudgetExceeded, match="process itself") as caught:
        MemoryBudget(100, base_bytes=90, headroom_bytes=20)
    assert caught.value.smallest_budget_bytes == 110


@pytest.mark.parametrize("parts", [(-1, 0, 0), (10, -1, 0), (10, 0, -1)])
def test_negative_parts_are_refused(parts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        MemoryBudget(*parts)


def test_a_negative_reservation_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        MemoryBudget(10).reserve("x", -1)


def test_threads_cannot_reserve_the_same_bytes() -> None:
    budget = MemoryBudget(1000)
    granted = []

    def grab() -> None:
        for _ in range(200):
            with contextlib.suppress(BudgetExceeded):
                granted.append(budget.reserve("x", 7))

    threads = [threading.Thread(target=grab) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 1000 // 7


def test_a_budget_of_another_size_has_the_same_parts() -> None:
    budget = MemoryBudget(1000, base_bytes=100, headroom_bytes=50)
    budget.reserve("KV cache", 300)
    budget.reserve("KV cache", 200)
    for total_bytes in (650, 5000):
        other = budget.with_total(total_bytes)
        assert other.table()[:-1] == budget.table()[:-1]
        assert other.available_bytes == total_bytes - 650
    with pytest.raises(BudgetExceeded):
        budget.with_total(649)
    assert budget.available_bytes == 350
