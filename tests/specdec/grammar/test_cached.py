"""The cache of constraints is bounded: clients write them."""

from __future__ import annotations

import gc
import weakref

import pytest

from specdec.grammar import cached, constraint, trial
from specdec.grammar.cached import Cached
from specdec.grammar.constraint import Constraint


def made() -> tuple[Cached[str], list[str]]:
    """A cache of at most three, and the first letters of those compiled, in order."""
    letters: list[str] = []

    def make(constraint: Constraint, suffix: str = "") -> str:
        letters.append(constraint.text[:1] + suffix)
        if constraint.text == "bad":
            raise ValueError("bad")
        return letters[-1]

    return Cached(make, limit=3), letters


def ask(values: Cached[str], sequences: str, n_characters: int = 1) -> None:
    for letter in sequences:
        assert values(Constraint("regex", letter * n_characters)) == letter


def test_the_most_recently_used_stay_cached() -> None:
    values, letters = made()
    ask(values, "abcaadabc")
    assert "".join(letters) == "abcdbc"


def test_everything_that_was_given_counts() -> None:
    values, letters = made()
    item = Constraint("regex", "a")
    assert [values(item, "1"), values(item, "2"), values(item, "1")] == ["a1", "a2", "a1"]
    assert letters == ["a1", "a2"]


def test_errors_are_not_cached() -> None:
    values, letters = made()
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            values(Constraint("regex", "bad"))
    assert (len(letters), len(values)) == (2, 0)


def test_long_constraints_are_evicted_sooner() -> None:
    values, letters = made()
    ask(values, "abacba", cached.MAX_CHARACTERS // 2)
    assert "".join(letters) == "abcba"


def test_a_constraint_larger_than_the_cache_is_made_once_for_its_request() -> None:
    values, letters = made()
    ask(values, "ab")
    ask(values, "xxx", cached.MAX_CHARACTERS + 1)
    assert ("".join(letters), len(values)) == ("abx", 1)
    ask(values, "ab")
    assert len(values) == 2


@pytest.mark.parametrize("keeper", [trial._PASSED, constraint._GRAMMARS])
def test_clients_constraints_are_freed(
    keeper: Cached[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 and 32 of a mebibyte each used to stay as long as the server ran."""
    monkeypatch.setattr(keeper, "_make", lambda constraint: constraint.text[:1])
    asked = []
    for letter in "abcdef":
        item = Constraint("regex", letter * (1 << 20))
        asked.append(weakref.ref(item))
        keeper(item)
        del item
    gc.collect()
    assert [item() is not None for item in asked] == [False] * 4 + [True] * 2
    keeper(Constraint("regex", "x" * (4 << 20)))  # other tests' constraints are evicted, too
    assert len(keeper) == 1
