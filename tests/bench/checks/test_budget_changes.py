"""One text under changing budgets that the kernel enforces."""

from __future__ import annotations

import json

import pytest

from bench.checks import budget_changes
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.units import GIB, MIB


@pytest.mark.slow
def test_each_budget_holds_and_the_text_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    argv = ["-m", "pair:target", "-md", "pair:draft", "--budgets", "2GiB,1GiB,1.5GiB"]
    budget_changes.app([*argv, "-n", "1500"], standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    rows = json.loads(line)["budgets"]
    assert [row["budget_bytes"] for row in rows] == [2 * GIB, GIB, 3 * GIB // 2]
    assert all(0 < row["rss_bytes"] <= row["budget_bytes"] for row in rows)
    assert all(row["n_tokens"] for row in rows)
