"""First rounds: a fixed tree asked in the places of its own rounds brings the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specdec
from bench.decode import first_rounds
from bench.decode.first_rounds import (
    N_ROUNDS,
    Rounds,
    Text,
    chosen_rounds,
    contexts,
    fixed_round,
    kept_of,
    rounds_of,
    summarise,
    table_of,
)
from bench.options import UsageMistake
from bench.table import text_of
from offload.process import remembered
from specdec.config import SpecConfig
from specdec.decoding import kept_experience

PROMPT = "def fibonacci(n):\n    "
LOAD = {"memory_budget": "1GiB", "ctx_size": 512}


def test_a_round_begins_with_what_those_before_it_brought() -> None:
    rounds = Rounds([[7], [8, 9], [10]], [4, 4])
    assert contexts([1, 2], rounds) == [[1, 2, 7], [1, 2, 7, 8, 9]]
    assert rounds.n_tokens == [2, 1]


def test_a_fixed_tree_brings_the_same_in_its_own_places() -> None:
    fixed = SpecConfig(num_draft_tokens=8, draft_depth=4)
    with specdec.load("pair:target", "pair:draft", num_draft_tokens=8, **LOAD) as llm:
        prompt = llm.tokenizer.encode(PROMPT)
        rounds = rounds_of(llm, prompt, N_ROUNDS, fixed)
        again = [fixed_round(llm, place, fixed) for place in contexts(prompt, rounds)]
    assert again == rounds.n_tokens
    assert rounds.nodes == [8] * N_ROUNDS
    assert sum(again) > N_ROUNDS


def test_every_text_begins_with_nothing_learnt_or_with_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_experience, "recall", remembered.recall)
    monkeypatch.setattr(kept_experience, "cache_folder", lambda: tmp_path)
    seen: list[Any] = []

    def noted(llm: Any, *_: Any) -> Rounds:
        seen.append(llm.session.experience.kept())
        return rounds_of(llm, prompt, 1, SpecConfig())

    monkeypatch.setattr(first_rounds, "rounds_of", noted)
    with specdec.load("pair:target", "pair:draft", **LOAD) as llm:
        prompt = llm.tokenizer.encode(PROMPT)
        with pytest.raises(UsageMistake, match="--fresh"):
            kept_of(llm)
        chosen_rounds(llm, [prompt, prompt], None)
        assert seen[0] == seen[1]
        assert not seen[0]["lessons"]
    with specdec.load("pair:target", "pair:draft", **LOAD) as llm:
        with pytest.raises(UsageMistake, match="--fresh"):
            kept_of(llm)  # a measurement is not kept
        llm.generate(PROMPT, max_tokens=8)
    with specdec.load("pair:target", "pair:draft", **LOAD) as llm:
        kept = kept_of(llm)
        chosen_rounds(llm, [prompt, prompt], kept)
    assert seen[2] == seen[3] == kept
    assert kept["lessons"]


def test_the_ratio_is_that_of_all_tokens() -> None:
    texts = [
        Text("a", [5, 6, 8, 9], [1, 2, 1, 4], [16, 3, 1, 8], [2, 2, 2, 2]),
        Text("b", [7, 8, 9, 12], [1, 1, 3, 4], [16, 1, 1, 0], [2, 2, 2, 2]),
    ]
    result = {**summarise(texts), "pair": "fresh", "fixed_tree": "64x16", "planned_most_nodes": 32}
    assert (result["chosen_tokens"], result["fixed_tokens"]) == (17, 16)
    assert result["ratio"] == 17 / 16
    assert [one["ratio"] for one in result["rounds"]] == [0.5, 0.75, 1.0, 2.0]
    assert [one["mean_chosen_nodes"] for one in result["rounds"]] == [16, 2, 1, 4]
    json.dumps(result)
    assert "1.06" in text_of([table_of(result)])
