"""Random mixes of sequences in a budget that the kernel enforces."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench.checks import kv_mixes
from bench.prompts.mixes import DRAFTING, mixes_of
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.units import MIB

TEXT = np.random.default_rng(0).integers(0, 4000, 3000).tolist()


def test_mixes_are_those_of_their_seed_and_fit() -> None:
    mixes = [mixes_of(seed, TEXT, 10, 400) for seed in (1, 1, 2)]
    assert mixes[0] == mixes[1] != mixes[2]
    calls = [call for part in mixes[1:] for mix in part for call in mix]
    assert all(len(call.prompt) + call.sampling["max_tokens"] <= 400 for call in calls)
    assert {call.drafting for call in calls} == set(range(len(DRAFTING)))
    assert {call.cancelled_after is None for call in calls} == {True, False}
    assert len({call.prompt[:1] for call in calls}) < len(calls), "common prefixes"


def result(**values: int) -> dict[str, int]:
    return {"n_different": 0, "n_files_left": 0, "kv_bytes_read": 1, **values}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n_different": 2}, "2 texts differ, 0 files are left"),
        ({"n_files_left": 1}, "0 texts differ, 1 files are left"),
        ({"kv_bytes_read": 0}, "nothing was checked"),
    ],
)
def test_what_fails_a_check(values: dict[str, int], words: str) -> None:
    kv_mixes.judge([result()])
    with pytest.raises(kv_mixes.MixesDiffer, match=words):
        kv_mixes.judge([result(), result(**values)])


@pytest.mark.parametrize(
    ("text", "is_cancelled", "is_equal"),
    [
        (([1, 2], [0.5, 0.25]), False, False),
        (([1, 2], [0.5, 0.25]), True, True),
        (([1, 2, 3], [0.5, 0.25, 0.125]), False, True),
        (([1, 2, 3], [0.5, 0.25, 0.126]), False, False),
        (([1, 2, 3, 4], [0.5, 0.25, 0.125, 0.1]), False, False),
        (([2], [0.5]), True, False),
        (([], []), True, True),
    ],
)
def test_which_texts_are_equal(text: kv_mixes.Text, is_cancelled: bool, is_equal: bool) -> None:
    expected = ([1, 2, 3], [0.5, 0.25, 0.125])
    assert kv_mixes.is_equal(text, expected, is_cancelled=is_cancelled) == is_equal


@pytest.mark.slow
def test_no_bit_differs_and_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    argv = ["-m", "pair:target", "-md", "pair:draft", "--mixes", "5", "--seed", "7"]
    kv_mixes.app(argv, standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    (load,) = json.loads(line)["loads"]
    assert load["n_texts"] > 5
    assert load["n_different"] == load["n_files_left"] == 0
    assert load["kv_bytes_read"] > 0
    assert load["kv_bytes_written"] > 0
    assert load["hot_kv_tokens"] < load["load"]["kv_tokens"]
