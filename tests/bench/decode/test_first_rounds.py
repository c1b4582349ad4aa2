"""First rounds: a fixed tree asked in the places of its own rounds brings the same."""

from __future__ import annotations

import specdec
from bench.decode.first_rounds import N_ROUNDS, places, rounds_of
from specdec.config import SpecConfig


def test_places_are_what_rounds_began_with() -> None:
    rounds = [[7], [8, 9], [10]]
    assert places([1, 2], rounds) == [[1, 2], [1, 2, 7, 8]]


def test_a_fixed_tree_brings_the_same_in_its_own_places() -> None:
    fixed = SpecConfig(num_draft_tokens=8, draft_depth=4, spec_type=("draft",))
    load = {"memory_budget": "1GiB", "ctx_size": 512, "num_draft_tokens": 8}
    with specdec.load("pair:target", "pair:draft", **load) as llm:
        prompt = llm.tokenizer.encode("def fibonacci(n):\n    ")
        rounds = rounds_of(llm, prompt, N_ROUNDS, fixed)
        again = [rounds_of(llm, place, 1, fixed) for place in places(prompt, rounds)]
    assert [one[1] for one in again] == rounds[1:]
    assert [one[0] for one in again] == [tokens[-1:] for tokens in rounds[:-1]]
    assert sum(map(len, rounds[1:])) > N_ROUNDS
