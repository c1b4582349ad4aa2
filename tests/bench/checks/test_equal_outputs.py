"""Outputs are compared for exact decodings only."""

from __future__ import annotations

from typing import Any

import pytest

from bench.checks.equal_outputs import OutputsDiffer, are_exact, check_equal_outputs, percent_equal


def record(tokens: list[int], prompt: str = "a", is_exact: bool = True, end: str = "") -> Any:
    stats = {"is_exact": is_exact}
    return {"prompt": prompt, "token_ids": tokens, "stats": stats, "finish_reason": end}


def test_what_is_exact_says_so() -> None:
    assert are_exact([record([1]), record([2], "b")])
    assert not are_exact([])
    assert not are_exact([record([1]), record([1], is_exact=False)])
    assert not are_exact([{"prompt": "a", "token_ids": [1]}])  # another program's


@pytest.mark.parametrize(
    "records",
    [
        [],
        [record([1, 2]), record([1, 2]), record([3], "b")],
        [record([1, 2]), record([9, 9], is_exact=False)],
        [record([1, 2, 3]), record([1, 2])],  # the slower one generated fewer tokens
        [record([1, 2, 3], end="length"), record([1, 2])],
    ],
)
def test_outputs_that_may_differ(records: list[Any]) -> None:
    check_equal_outputs(records)


@pytest.mark.parametrize("other", [[1, 2, 4], [1, 2]])
def test_a_difference_names_prompt_and_position(other: list[int]) -> None:
    records = [record([5], "b"), record([1, 2, 3], end="length"), record(other, end="stop")]
    with pytest.raises(OutputsDiffer, match="two outputs for a differ from token 2 on"):
        check_equal_outputs(records)


def test_a_hundred_per_cent_are_all_of_them() -> None:
    shown = [percent_equal(match) for match in (1.0, 0.99999, 0.5, 0.0, None)]
    assert shown == ["100 %", "99.9 %", "50.0 %", "0.0 %", "-"]
