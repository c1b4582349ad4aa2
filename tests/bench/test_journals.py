"""Results from hand-written journals."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.results import (
    acceptance_by_depth,
    by_category,
    compare_tokens,
    describe_ratio,
    pairwise_ratios,
    summarise,
)


def record(
    prompt: str = "a",
    arrivals: list[tuple[float, int]] | None = None,
    category: str = "",
    tokens: list[int] | None = None,
    read: list[int] | None = None,
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "category": category,
        "arrivals": [(2.0, 1), (3.0, 4), (5.0, 1)] if arrivals is None else arrivals,
        "token_ids": tokens or [],
        "bytes_read": read,
    }


def test_tokens_that_come_together_share_their_time() -> None:
    results = summarise([record()], speculates=True)
    assert results["tokens_per_second"] == pytest.approx(5 / 3)
    assert results["time_to_first_token"] == 2.0
    assert results["seconds_per_token_median"] == pytest.approx(0.25)
    assert results["seconds_per_token_p90"] == pytest.approx(2.0)
    assert results["mean_acceptance_length"] == pytest.approx(5 / 2)
    assert (results["n_prompts"], results["n_tokens"]) == (1, 6)


def test_rates_come_from_totals() -> None:
    fast, slow = record("a", [(1.0, 1), (2.0, 9)]), record("b", [(3.0, 1), (7.0, 1)])
    assert summarise([fast, slow])["tokens_per_second"] == pytest.approx(10 / 5)
    assert summarise([fast, slow])["mean_acceptance_length"] is None  # without speculation


def test_bytes_are_those_after_the_first_arrival() -> None:
    first, second = record(read=[0, 1000, 1500]), record(read=None)
    assert summarise([first])["bytes_read_per_token"] == pytest.approx(100.0)
    assert summarise([first, second])["bytes_read_per_token"] == pytest.approx(100.0)
    assert summarise([second])["bytes_read_per_token"] is None


def test_nothing_measured_is_no_result() -> None:
    for records in ([], [record(arrivals=[(1.0, 1)])]):
        results = summarise(records, speculates=True)
        assert results["tokens_per_second"] is None
        assert results["seconds_per_token_median"] is None
        assert results["mean_acceptance_length"] is None


def test_categories() -> None:
    records = [record("a", category="x"), record("b", category="y"), record("c", category="x")]
    actual = by_category(records)
    assert {name: results["n_prompts"] for name, results in actual.items()} == {"x": 2, "y": 1}
    assert by_category([record()]) == {}


def test_ratios_are_over_common_prompts_only() -> None:
    ours = [record("a", [(0.0, 1), (1.0, 4)]), record("b", [(0.0, 1), (1.0, 100)])]
    theirs = [record("a", [(0.0, 1), (2.0, 4)])]
    ratios = pairwise_ratios({"ours": ours, "theirs": theirs, "none": []})
    assert ratios["ours"] == {
        "theirs": {"ratio": pytest.approx(2.0), "n_prompts": 1, "n_tokens": 4}
    }
    assert ratios["theirs"]["ours"]["ratio"] == pytest.approx(0.5)
    assert ratios["none"] == {}


def test_ratios_are_over_common_tokens_only() -> None:
    """Ours slows down after two tokens, when theirs has ended; those tokens must not count."""
    ours = [record("a", [(0.0, 1), (1.0, 2), (101.0, 2)])]
    theirs = [record("a", [(0.0, 1), (1.0, 1), (4.0, 1)])]
    actual = pairwise_ratios({"ours": ours, "theirs": theirs})
    assert actual["ours"]["theirs"] == {"ratio": pytest.approx(4.0), "n_prompts": 1, "n_tokens": 2}
    assert actual["theirs"]["ours"]["ratio"] == pytest.approx(0.25)


def test_tokens_of_a_pass_that_is_cut_share_its_time() -> None:
    ours = [record("a", [(0.0, 1), (4.0, 8)])]
    theirs = [record("a", [(0.0, 1), (1.0, 1), (2.0, 1)])]
    assert pairwise_ratios({"ours": ours, "theirs": theirs})["ours"]["theirs"] == {
        "ratio": pytest.approx(2.0),
        "n_prompts": 1,
        "n_tokens": 2,
    }


def test_tokens_that_came_with_the_first_one_are_not_compared() -> None:
    """Their seconds belong to the prompt: one program emitted three tokens with it, one did not."""
    ours = [record("a", [(9.0, 3), (10.0, 2)])]
    theirs = [record("a", [(0.0, 1), (5.0, 2), (7.0, 2)])]
    assert pairwise_ratios({"ours": ours, "theirs": theirs})["ours"]["theirs"] == {
        "ratio": pytest.approx(2.0),
        "n_prompts": 1,
        "n_tokens": 2,
    }
    short = [record("a", [(9.0, 5)])]
    assert pairwise_ratios({"short": short, "theirs": theirs})["theirs"] == {}


ARRIVALS = st.lists(st.tuples(st.floats(0.01, 9.0), st.integers(1, 5)), min_size=1, max_size=6)


@given(own=ARRIVALS, other=ARRIVALS)
def test_a_ratio_and_its_reverse_are_over_the_same_tokens(
    own: list[tuple[float, int]], other: list[tuple[float, int]]
) -> None:
    runs = {
        name: [
            record("a", [(sum(s for s, _ in steps[: i + 1]), n) for i, (_, n) in enumerate(steps)])
        ]
        for name, steps in (("own", own), ("other", other))
    }
    ratios = pairwise_ratios(runs)
    n_shared = min(sum(n for _, n in s) for s in (own, other)) - max(own[0][1], other[0][1])
    if n_shared < 1:
        assert ratios == {"own": {}, "other": {}}
        return
    there, back = ratios["own"]["other"], ratios["other"]["own"]
    assert there["n_tokens"] == back["n_tokens"] == n_shared
    assert there["ratio"] * back["ratio"] == pytest.approx(1.0)


def test_results_of_earlier_versions_do_not_know_the_tokens() -> None:
    assert describe_ratio({"ratio": 2.0, "n_prompts": 3}) == "3 prompts"
    assert describe_ratio({"ratio": 2.0, "n_prompts": 3, "n_tokens": 9}) == "3 prompts, 9 tokens"


def test_token_match_is_over_the_shorter_output() -> None:
    reference = [record("a", tokens=[1, 2, 3, 4])]
    for prompt, tokens, expected in (
        ("a", [1, 2], 1.0),
        ("a", [1, 9, 3, 4], 0.25),
        ("b", [1], None),
    ):
        actual = compare_tokens([record(prompt, tokens=tokens)], reference)
        assert actual["token_match"] == expected


def test_depths_are_summed() -> None:
    stats = [
        {"tried_by_depth": [3, 2], "accepted_by_depth": [2, 1]},
        None,
        {"tried_by_depth": [1], "accepted_by_depth": [0]},
    ]
    assert acceptance_by_depth(stats) == [
        {"tried": 4, "accepted": 2},
        {"tried": 2, "accepted": 1},
    ]
    assert acceptance_by_depth([None, {}]) is None
