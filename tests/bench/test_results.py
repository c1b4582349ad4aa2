"""Results from hand-written records."""

from __future__ import annotations

from typing import Any

import pytest

from bench import results
from bench.results import (
    efficiency,
    median_pass_seconds,
    pass_times_of,
    typical_pass_seconds,
)
from specdec.metrics.stats import GenerationStats, MeasuredPass


def record(
    prompt: str = "a",
    mode: str = "plain",
    tokens: tuple[int, ...] = (1, 2, 3),
    bandwidth: float = 1000.0,
    **stats: Any,
) -> dict[str, Any]:
    values = GenerationStats(**{"generated_tokens": len(tokens), **stats}).to_dict()
    return {
        "prompt": prompt,
        "mode": mode,
        "token_ids": list(tokens),
        "finish_reason": "length",
        "stats": values,
        "storage_bytes_per_second": bandwidth,
    }


def test_rates_come_from_totals() -> None:
    fast = record(tokens=(0,) * 11, decode_seconds=1.0, passes=10, peak_memory_bytes=5)
    slow = record(tokens=(0,) * 3, decode_seconds=4.0, passes=1, peak_memory_bytes=7)
    slow["stats"]["accepted_tokens"] = 1
    total = results.aggregate_stats([fast, slow])
    assert total["tokens_per_second"] == pytest.approx(12 / 5)  # 10 + 2 decoded tokens
    assert total["time_per_output_token"] == pytest.approx(5 / 12)
    assert total["mean_acceptance_length"] == pytest.approx(1 + 1 / 11)
    assert total["generated_tokens"] == 14
    assert total["peak_memory_bytes"] == 7


def test_an_aggregate_of_one_equals_the_original() -> None:
    item = record(
        tokens=(0,) * 9,
        decode_seconds=2.0,
        time_to_first_token=0.5,
        passes=4,
        drafted_tokens=16,
        accepted_tokens=4,
        ngram_hits=1,
        kv_bytes=100,
        model_flops=30,
        peak_flops_per_second=60.0,
        kv_used_fraction=0.5,
        time_per_output_token_p90=0.3,
    )
    total = results.aggregate_stats([item])
    assert total.pop("ngram_share") == 0.25
    assert total == item["stats"]


def test_nothing_decoded_divides_by_nothing() -> None:
    total = results.aggregate_stats([record(tokens=(5,))])
    assert total["tokens_per_second"] == 0.0
    assert total["acceptance_rate"] == 0.0
    assert results.aggregate_stats([])["time_to_first_token"] == 0.0


def test_roofline_weighs_each_record_with_its_own_probe() -> None:
    records = [
        record(passes=2, decode_seconds=4.0, bandwidth=1000.0),
        record(passes=2, decode_seconds=2.0, bandwidth=2000.0),
    ]
    # 1000 bytes a pass: at best 2 s + 1 s, measured 6 s.
    assert results.roofline_fraction(records, 1000) == pytest.approx(0.5)
    assert results.roofline_fraction(records, 0) is None


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ([1, 2], [1, 2], None),
        ([], [], None),
        ([1, 2], [1, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1], 1),
    ],
)
def test_first_mismatch(left: list[int], right: list[int], expected: int | None) -> None:
    assert results.first_mismatch(left, right) == expected


def test_compare_tokens_names_prompt_and_position() -> None:
    plain = [record("a", tokens=(1, 2, 3, 4)), record("b", tokens=(5, 6, 7, 8))]
    speculative = [record("b", tokens=(5, 9, 7, 8)), record("a", tokens=(1, 2, 3, 4))]
    result = results.compare_tokens(speculative, plain)
    assert result == {
        "token_match": 5 / 8,
        "prompts_equal": 1,
        "first_mismatches": {"b": 1},
    }


def test_depths_are_summed() -> None:
    item = record(tried_by_depth=(3, 1), accepted_by_depth=(2, 0))
    other = record(tried_by_depth=(1,), accepted_by_depth=(1,))
    total = results.aggregate_stats([item, other])
    assert (total["tried_by_depth"], total["accepted_by_depth"]) == ([4, 1], [3, 0])


TIMES = [
    MeasuredPass(1, 1.0),
    MeasuredPass(1, 2.0),
    MeasuredPass(1, 30.0),
    MeasuredPass(5, 4.0, True),
]


def test_median_of_one_size() -> None:
    assert median_pass_seconds(TIMES, 1) == 2.0
    assert median_pass_seconds(TIMES, 5) == 4.0
    assert median_pass_seconds(TIMES, 2) is None


def test_passes_of_several_sizes_weigh_by_their_number() -> None:
    assert typical_pass_seconds(TIMES) == pytest.approx((3 * 2.0 + 4.0) / 4)
    assert typical_pass_seconds([]) is None


def test_records_of_json_and_of_this_process() -> None:
    records = [{"pass_times": [[1, 1.0, False], [1, 2.0, False]]}, {"pass_times": TIMES[2:]}]
    assert pass_times_of(records) == TIMES


def test_efficiency_is_what_arrives_of_the_promise() -> None:
    """A pass of twice the time yields four tokens: at best twice the speed."""
    assert efficiency(2.0, 4.0, 1.0, 2.0) == pytest.approx(1.0)
    assert efficiency(1.5, 4.0, 1.0, 2.0) == pytest.approx(0.75)
    assert efficiency(1.5, 4.0, None, 2.0) is None
    assert efficiency(1.5, 4.0, 1.0, None) is None
