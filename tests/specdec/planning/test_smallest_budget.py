"""The smallest budget of `specdec plan` is the one of a run, in fresh processes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT
from tiny_pair import save_model

from offload.units import MIB
from specdec.planning.memory.planner import BASE_JITTER_BYTES

TINY = "tiny"
FEW = ("--threads", "1", "-c", "512", "--parallel", "1")


def command(cache: Path, name: str, model: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specdec", name, "-m", model, *FEW, *more],
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(cache),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )


def smallest_bytes(cache: Path, model: str) -> int:
    plan = command(cache, "plan", model, "--memory-budget", "2GiB", "--json")
    assert plan.returncode == 0, plan.stderr
    n_bytes = json.loads(plan.stdout)["smallest_budget_bytes"]
    assert n_bytes % MIB == 0, "as it is printed"
    return n_bytes


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("model", ["pair:target.gguf", TINY, "pair:target", "pair:hybrid"])
def test_a_run_takes_the_smallest_budget_of_a_plan(model: str, tmp_path: Path) -> None:
    """Also where only one of them times the machine, which leaves up to 90 MiB behind."""
    name = str(save_model(tmp_path / "model", seed=1)) if model == TINY else model
    cache = tmp_path / "cache"

    def run(budget_mib: int) -> subprocess.CompletedProcess[str]:
        budget = f"{budget_mib}MiB"
        return command(cache, "run", name, "-p", "x", "-n", "1", "--memory-budget", budget)

    for is_planned_first in (True, False):
        if not is_planned_first:
            command(cache, "run", name, "-p", "x", "-n", "1")
        n_bytes = smallest_bytes(cache, name)
        if is_planned_first:
            shutil.rmtree(cache)
        done = run(n_bytes // MIB)
        assert done.returncode == 0, done.stderr
    for budget in (64, n_bytes // MIB - 16):
        refused = run(budget)
        assert refused.returncode == 2
        actual = re.search(r"the smallest budget that works is (\d+) MiB", refused.stderr)
        assert actual is not None, refused.stderr
        assert abs(int(actual[1]) * MIB - n_bytes) <= BASE_JITTER_BYTES
    accepted = run(int(actual[1]))
    assert accepted.returncode == 0, accepted.stderr
    plan = command(cache, "plan", name, "--memory-budget", f"{n_bytes // MIB}MiB", "--json")
    smallest = json.loads(plan.stdout)["smallest_budget_bytes"]
    assert smallest <= n_bytes, "a budget that works is not below the smallest"
