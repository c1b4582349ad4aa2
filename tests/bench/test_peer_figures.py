"""Figures from journals that were made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bench.peer_figures import (
    acceptance_by_depth,
    by_category,
    pairwise_ratios,
    summarise,
    token_match,
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
    figures = summarise([record()], speculates=True)
    assert figures["tokens_per_second"] == pytest.approx(5 / 3)
    assert figures["time_to_first_token"] == 2.0
    assert figures["seconds_per_token_median"] == pytest.approx(0.25)
    assert figures["seconds_per_token_p90"] == pytest.approx(2.0)
    assert figures["mean_acceptance_length"] == pytest.approx(5 / 2)
    assert (figures["n_prompts"], figures["n_tokens"]) == (1, 6)


def test_rates_come_from_totals() -> None:
    fast, slow = record("a", [(1.0, 1), (2.0, 9)]), record("b", [(3.0, 1), (7.0, 1)])
    assert summarise([fast, slow])["tokens_per_second"] == pytest.approx(10 / 5)
    assert summarise([fast, slow])["mean_acceptance_length"] is None  # it does not speculate


def test_bytes_are_those_after_the_first_arrival() -> None:
    first, second = record(read=[0, 1000, 1500]), record(read=None)
    assert summarise([first])["bytes_read_per_token"] == pytest.approx(100.0)
    assert summarise([first, second])["bytes_read_per_token"] == pytest.approx(100.0)
    assert summarise([second])["bytes_read_per_token"] is None


def test_nothing_measured_is_no_figure() -> None:
    for records in ([], [record(arrivals=[(1.0, 1)])]):
        figures = summarise(records, speculates=True)
        assert figures["tokens_per_second"] is None
        assert figures["seconds_per_token_median"] is None
        assert figures["mean_acceptance_length"] is None


def test_categories() -> None:
    records = [record("a", category="x"), record("b", category="y"), record("c", category="x")]
    found = by_category(records)
    assert {name: figures["n_prompts"] for name, figures in found.items()} == {"x": 2, "y": 1}
    assert by_category([record()]) == {}


def test_ratios_are_over_common_prompts_only() -> None:
    ours = [record("a", [(0.0, 1), (1.0, 4)]), record("b", [(0.0, 1), (1.0, 100)])]
    theirs = [record("a", [(0.0, 1), (2.0, 2)])]
    ratios = pairwise_ratios({"ours": ours, "theirs": theirs, "none": []})
    assert ratios["ours"] == {"theirs": {"ratio": pytest.approx(4.0), "n_prompts": 1}}
    assert ratios["theirs"]["ours"]["ratio"] == pytest.approx(0.25)
    assert ratios["none"] == {}


def test_token_match_is_over_the_shorter_text() -> None:
    reference = [record("a", tokens=[1, 2, 3, 4])]
    assert token_match([record("a", tokens=[1, 2])], reference) == 1.0
    assert token_match([record("a", tokens=[1, 9, 3, 4])], reference) == 0.25
    assert token_match([record("b", tokens=[1])], reference) is None


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
