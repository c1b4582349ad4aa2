"""Eviction: GreedyDual against LRU by tokens and GreedyDual-Size, in tokens computed again.

The simulation has the cache's own class, on a backend that only counts tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from table_backend import TableBackend

from backends.contract.prefix_cache import PrefixCache
from backends.contract.sequence import SequenceInput, common_length

CAPACITY = 8192
START = 3000


class CountingBackend(TableBackend):
    """A backend with capacity for so many tokens, whatever sequences share."""

    def __init__(self, cached: Callable[[], int]) -> None:
        super().__init__(lambda prefix: 1.0, vocab=2, max_context=CAPACITY)  # type: ignore[arg-type,return-value]
        self._num_cached = cached

    def n_fitting(self, batch: Sequence[SequenceInput]) -> int:
        num_new = sum(len(item.token_ids) for item in batch)
        return len(batch) if self._num_cached() + num_new <= CAPACITY else 0


class LeastRecentlyUsed(PrefixCache):
    """LRU by tokens."""

    def evict(self, max_seconds: float | None = None) -> bool:
        if not self._cached:
            return False
        self._cached.pop(0).kv.close()
        return True


class GreedyDualSize(PrefixCache):
    """Values divided by tokens (Cao and Irani 1997)."""

    def evict(self, max_seconds: float | None = None) -> bool:
        if not self._cached:
            return False
        values = [
            item.base_value + self.seconds(item.kv.n_committed) / item.kv.n_committed
            for item in self._cached
        ]
        index = min(range(len(values)), key=values.__getitem__)
        self._last_value = max(self._last_value, values[index])
        self._cached.pop(index).kv.close()
        return True


def num_distinct(cache: PrefixCache) -> int:
    """Return the tokens of all sequences; common prefixes count once."""
    ordered = sorted(list(kv.committed_ids) for kv in (*cache._in_use, *cache.cached))
    shared = map(common_length, ordered, ordered[1:])
    return sum(map(len, ordered)) - sum(shared)


def computed(kind: type[PrefixCache], requests: Sequence[list[int]]) -> int:
    """Return the tokens that requests compute, with a cache of this kind."""
    cache: PrefixCache
    backend = CountingBackend(lambda: num_distinct(cache))
    cache = kind(backend)
    cache.seconds = lambda num_tokens: max(0.0, num_tokens - 16.0)  # the first hide behind a read
    total = 0
    for ids in requests:
        kv = cache.allocate(ids)
        new = ids[kv.n_committed :]
        cache.ensure_capacity(kv, len(new))
        kv.table.append(new)  # type: ignore[attr-defined]
        total += len(new)
        cache.release(kv)
    return total


def session(length: int, num_turns: int, first: int) -> Iterator[list[int]]:
    ids = [first * 10_000 + i for i in range(length)]
    for turn in range(num_turns):
        yield list(ids)
        ids += [first * 10_000 + 5_000 + turn * 100 + i for i in range(50)]


def short(rng: random.Random, number: int) -> list[int]:
    return [10**6 + 1000 * number + i for i in range(rng.randint(20, 100))]


def beside_short_requests() -> list[list[int]]:
    """A long session, whose user thinks while others send short requests."""
    rng, requests, number = random.Random(1), [], 0
    for turn in session(START, 10, 1):
        requests.append(turn)
        for _ in range(rng.choice((0, 20, 100, 200))):
            requests.append(short(rng, number := number + 1))
    return requests


def beside_a_document() -> list[list[int]]:
    """A session that goes on for long after one prompt that nearly fills the cache."""
    document = [9 * 10**7 + i for i in range(7000)]
    return [*session(1500, 2, 1), document, *list(session(1500, 30, 1))[2:]]


def of_many_users() -> list[list[int]]:
    """Eight sessions in turns, more than fit, with short requests between them."""
    rng, number, requests = random.Random(2), 0, []
    sessions = [session(rng.choice((300, 1000, 2000)), 12, 1 + user) for user in range(8)]
    for _ in range(12):
        for turns in sessions:
            requests.append(next(turns))
            for _ in range(5):
                requests.append(short(rng, number := number + 1))
    return requests


# Of each case: the tokens computed relative to LRU and to GreedyDual-Size.
CASES = {
    beside_short_requests: (0.8, 0.95),
    beside_a_document: (1.0, 1.0),
    of_many_users: (0.65, 0.65),
}


@pytest.mark.parametrize("case", CASES)
def test_fewer_tokens_are_computed_again_than_with_other_rules(
    case: Callable[[], list[list[int]]],
) -> None:
    requests = case()
    num_tokens = computed(PrefixCache, requests)
    for kind, share in zip((LeastRecentlyUsed, GreedyDualSize), CASES[case], strict=True):
        assert num_tokens <= share * computed(kind, requests)
