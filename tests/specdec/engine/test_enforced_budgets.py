"""The kernel enforces each budget of a run from the step after the change on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from budget_changes import grow

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.process.limited import OK, Limits, run_limited
from offload.units import MIB

SCRIPT = """
import json, sys, time
import specdec
from offload.process.memory import memory_cgroups, memory_limit

location = min(memory_cgroups(), key=lambda item: item.version)
name = {1: "memory.limit_in_bytes", 2: "memory.max"}[location.version]
file = location.directory / name

def limit(n_bytes):
    file.write_text(str(n_bytes))
    assert memory_limit().n_bytes == n_bytes

model, draft, smallest, more = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
largest, *budgets = [smallest + (n << 20) for n in more]
options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 3}
with specdec.load(model, draft, memory_budget=largest, ctx_size=256, threads=1) as llm:
    limit(largest)
    expected = llm.generate("def add(a, b):", **options).token_ids
    for budget in budgets:
        stream = llm.stream("def add(a, b):", cache_prompt=False, **options)
        chunks = iter(stream)
        next(chunks)
        is_smaller = budget < llm.plan.budget_bytes
        if not is_smaller:
            limit(budget)
        llm.set_memory_budget(budget)
        next(chunks)
        if is_smaller:
            limit(budget)  # fails, or gets this process killed, if more is in use
        for _ in chunks:
            pass
        assert stream.result.token_ids == expected, budget
    limit(budgets[-1] - (20 << 20))
    ends = time.monotonic() + 120
    while llm.plan.budget_bytes == budgets[-1] and time.monotonic() < ends:
        assert llm.generate("def add(a, b):", **options).token_ids == expected
    assert llm.plan.budget_bytes == budgets[-1] - (20 << 20)
print("all of them")
"""


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("kind", ["checkpoint", pytest.param("gguf", marks=pytest.mark.gguf)])
def test_no_budget_is_exceeded(tmp_path: Path, kind: str) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    if kind == "gguf":
        pytest.importorskip("llama_cpp")
        model, draft = grow(tmp_path / "model.gguf", "--format", "gguf"), "pair:draft.gguf"
    else:
        model, draft = grow(tmp_path / "model"), "pair:draft"
    smallest = _smallest(tmp_path, model, draft)
    budgets = json.dumps([400, 100, 350, 60])
    argv = [sys.executable, "-c", SCRIPT, str(model), draft, str(smallest), budgets]
    outcome = run_limited(argv, Limits(4096 * MIB, 300), os.environ, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert (outcome.exit, outcome.oom_kills) == (OK, 0), log
    assert log.splitlines()[-1] == "all of them"
    assert "the memory budget follows it" in log


def _smallest(tmp_path: Path, model: Path, draft: str) -> int:
    """Return the smallest budget of the run in a process of its own."""
    script = (
        "import sys, specdec; print(specdec.plan_run(*sys.argv[1:], ctx_size=256, threads=1)"
        ".smallest_budget_bytes)"
    )
    log = tmp_path / "smallest"
    argv = [sys.executable, "-c", script, str(model), draft]
    assert run_limited(argv, Limits(None, 120), os.environ, log).exit == OK, log.read_text()
    return int(log.read_text().split()[-1])
