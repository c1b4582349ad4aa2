"""One text beyond its context, in a budget that the kernel enforces."""

from __future__ import annotations

import json

import pytest

from bench.checks import endless_text
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.units import GIB, MIB


@pytest.mark.slow
def test_the_budget_holds_and_the_text_is_plain_decodings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    argv = ["-m", "pair:target", "-md", "pair:draft", "--memory-budget", "1GiB", "-c", "128"]
    endless_text.app([*argv, "-n", "600", "--parts", "3"], standalone_mode=False)
    *_, line = capsys.readouterr().out.strip().splitlines()
    rows = json.loads(line)["parts"]
    assert sum(row["num_tokens"] for row in rows) == 600
    assert all(0 < row["rss_bytes"] <= GIB for row in rows)
