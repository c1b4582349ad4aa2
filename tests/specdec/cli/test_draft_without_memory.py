"""A draft without memory, in commands and in Python: the target runs alone, with one note."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import expect_error
from tiny_pair import save_model

import specdec
from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.units import GIB, MIB
from specdec.cli.app import main
from specdec.planning.measurements import Measurements
from specdec.planning.memory.planner import MemoryPlanner
from specdec.planning.opening import open_pair
from specdec.planning.plan import make_plan
from specdec.run_options import RunOptions

CTX = 4096
LARGE_CACHE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
"""KV cache of 16 KiB per context token, and next to no weights."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    target = save_model(root / "target", seed=1)
    return str(target), str(save_model(root / "draft", seed=1, **LARGE_CACHE))


@pytest.fixture
def budget(pair: tuple[str, str]) -> int:
    plan = specdec.plan_run(*pair, ctx_size=CTX, memory_budget="4GiB")
    assert plan.draft_placement is not None
    assert plan.smallest_budget_bytes > plan.smallest_without_draft_bytes
    return plan.smallest_without_draft_bytes


def argv(command: str, pair: tuple[str, str], budget: int, *more: str) -> list[str]:
    models = ["-m", pair[0], "-md", pair[1], "-c", str(CTX), "--threads", "1"]
    return [command, *models, "--memory-budget", f"{budget}B", *more]


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("command", ["plan", "run", "chat", "batch"])
def test_a_command_says_it_once_and_runs(
    command: str,
    pair: tuple[str, str],
    budget: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "abc"}\n')
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    more = {
        "plan": (),
        "run": ("-p", "abc", "-n", "4"),
        "chat": ("-n", "4"),
        "batch": (str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "-n", "4"),
    }
    assert main(argv(command, pair, budget, *more[command])) == 0
    out, err = capsys.readouterr()
    (note,) = (line for line in (out + err).splitlines() if "the draft is left out" in line)
    assert "has no memory for it; the smallest with it is " in note
    assert f"without it {budget // 2**20} MiB" in note


def test_the_json_of_a_run_names_the_budgets(
    pair: tuple[str, str], budget: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv("plan", pair, budget, "--json")) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["draft_device"] is None
    assert actual["smallest_budget_bytes"] == actual["smallest_without_draft_bytes"] == budget
    (note,) = actual["notes"]
    assert "the draft is left out" in note


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("kind", ["draft", "draft,ngram"])
def test_a_demanded_draft_is_refused(
    kind: str, pair: tuple[str, str], budget: int, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("-p", "abc", "--spec-type", kind)
    without = f"without the draft it is {budget // 2**20} MiB"
    expect_error(capsys, argv("run", pair, budget, *more), "the smallest budget", without)


def test_another_vocabulary_stays_an_error(
    pair: tuple[str, str], budget: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = str(save_model(tmp_path / "other", seed=1, first=7, **LARGE_CACHE))
    capsys.readouterr()
    expect_error(
        capsys, argv("run", (pair[0], other), budget, "-p", "abc"), "does not fit the target"
    )


@pytest.mark.slow_except(1)
@pytest.mark.parametrize(
    "options", [{}, {"acceptance": "rejection", "draft_window": 3000, "draft_device": "cpu"}]
)
def test_in_python_the_output_is_the_targets_own(
    options: dict[str, Any], pair: tuple[str, str], budget: int
) -> None:
    with specdec.load(*pair, memory_budget=budget, ctx_size=CTX, **options) as llm:
        assert llm.draft is None
        assert llm.spec.spec_type == ("ngram",)
        assert len(llm.plan.notes) == 1
        actual = llm.generate("abc", max_tokens=8, ignore_eos=True)
        plain = llm.generate("abc", max_tokens=8, ignore_eos=True, speculative=False)
    assert actual.token_ids == plain.token_ids
    assert len(actual.token_ids) == 8


def test_one_that_has_no_memory_is_not_chosen_automatically(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no other models
    smallest = specdec.plan_run("pair:target", "pair:draft").smallest_without_draft_bytes
    argv = ["plan", "-m", "pair:target", "-md", "auto", "--memory-budget", f"{smallest}B"]
    assert main(argv) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "expected" in line]
    assert "n-grams draft: accepted tokens assumed" in line
    assert "pair:draft left out" in line


@pytest.mark.gguf
def test_of_a_gguf_pair_llama_cpps_buffers_count() -> None:
    pytest.importorskip("llama_cpp")
    options = RunOptions("pair:target.gguf", "pair:draft.gguf", ctx_size=2048, exact="off")
    pair, curve = open_pair(options), ComputeCurve.linear(1e-12, 1e-15)
    metrics = Measurements(1e9, ModelCompute(curve, MIB), ModelCompute(curve, MIB))
    smallest = MemoryPlanner(*pair.sources, options, 400 * MIB).smallest_alone.host_bytes
    plan = make_plan(options, pair, metrics, smallest, "as asked", 400 * MIB)
    assert plan.draft_placement is None
    assert len(plan.notes) == 1
    with_draft = make_plan(options, pair, metrics, 4 * GIB, "as asked", 400 * MIB)
    assert dict(with_draft.parts)["draft activations"] > 0
    assert with_draft.smallest_budget_bytes > smallest
