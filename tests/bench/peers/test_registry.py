"""`specdec-bench peers` with fake programs: every way in which one may end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_peers
import pytest
from tiny_pair import save_model

from bench.commands.app import main
from bench.commands.peers import UsageMistake, all_weights, parse_peers
from bench.peers import runs as peer_runs
from bench.peers.compare import NOT_RUN, compare
from bench.peers.program import Task
from bench.peers.registry import (
    DRAFT_CHAINS,
    DRAFTING,
    MEMORY,
    PEERS,
    Peer,
    Weights,
    memory_amounts,
    why_not,
)
from bench.peers.runs import ProgramRunner, RunSettings
from bench.peers.weights import describe_weights
from bench.prompts.workloads import Prompt
from bench.report.tables import tables
from bench.table import text_of
from offload.process.cgroup import CgroupUnavailable, MemoryCgroup
from offload.process.limited import FAILED, OK, OOM_KILLED, TIMED_OUT
from offload.units import GIB, MIB

ROW_KEYS = {
    "peer", "weights", "exit", "reason", "tokens_per_second", "time_to_first_token",
    "seconds_per_token_median", "seconds_per_token_p90", "bytes_read_per_token",
    "mean_acceptance_length", "n_prompts", "n_tokens", "acceptance_by_depth",
    "peak_anonymous_bytes", "cgroup_peak_bytes", "peak_rss_bytes", "load_seconds", "token_match",
    "by_category", "is_exact", "settings", "rewrite_seconds", "trials", "processes", "prompts",
}  # fmt: skip
KEYS = {
    "peers", "ratios", "weights", "memory_budget_bytes", "enforced", "storage_mbps",
    "storage_bytes_per_second", "n_prompts", "n_prompts_too_long", "max_tokens",
    "time_limit_seconds", "n_threads", "ctx_size", "provenance",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(tmp_path, monkeypatch)


def settings(**more: Any) -> RunSettings:
    values = {
        "memory_bytes": 400 * MIB, "n_tokens": 10, "seconds": 20.0, "n_threads": 1, "n_ctx": 64,
        "enforce": False,
    }  # fmt: skip
    return RunSettings(**{**values, **more})


def run(target: Path, outputs: list[str], names: tuple[str, ...] = ("slow",), **more: Any) -> Any:
    prompts = [Prompt(f"p{i}", text, f"c{i % 2}") for i, text in enumerate(outputs)]
    return compare(names, [Weights.of(target)], prompts, settings(**more), ["specdec-bench"])


def test_two_programs_and_one_that_is_not_there(target: Path) -> None:
    result = run(target, ["a", "b", "c"], ("slow", "fast", "absent"))
    assert set(result) == KEYS
    slow, fast, absent = result["peers"]
    for row in result["peers"]:
        assert set(row) == ROW_KEYS
    assert (slow["exit"], slow["n_prompts"], slow["n_tokens"]) == (OK, 3, 30)
    assert len(slow["processes"]) == 2  # half before the other program, half after
    assert slow["mean_acceptance_length"] is None
    assert fast["mean_acceptance_length"] == pytest.approx(3.0)
    assert fast["settings"]["threads"] == 1
    assert set(fast["by_category"]) == {"c0", "c1"}
    assert (absent["exit"], absent["reason"]) == (NOT_RUN, "not installed: pip install x")
    assert result["ratios"]["fast"]["slow"]["n_prompts"] == 3
    assert json.loads(json.dumps(result)) is not None
    text = text_of(tables("peers", result))
    assert "not-run: not installed: pip install x" in text
    assert "NOT enforced" in text
    assert "None" not in text


def test_turns_are_taken_in_reverse_and_share_the_time(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[tuple[str, str, float]] = []
    start = ProgramRunner.run

    def note(self: ProgramRunner, prompts: Any, seconds: float) -> Any:
        turns.append((self.peer.name, "".join(prompt.text for prompt in prompts), seconds))
        return start(self, prompts, seconds)

    monkeypatch.setattr(ProgramRunner, "run", note)
    run(target, ["a", "b", "c"], ("slow", "fast"), seconds=30.0)
    first = [("slow", "ab", 20.0), ("fast", "ab", 20.0)]
    assert turns == [*first, ("fast", "c", 10.0), ("slow", "c", 10.0)]


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("crash", "RuntimeError: no kernel for this machine"),
        ("vanish", "exit code 3: bus error at 0x0"),
    ],
)
def test_a_crash_keeps_what_was_measured(target: Path, word: str, reason: str) -> None:
    [row] = run(target, ["a", word, "b"])["peers"]
    assert (row["exit"], row["reason"]) == (FAILED, reason)
    assert (row["n_prompts"], len(row["processes"])) == (1, 1)  # the second half is not tried
    assert row["tokens_per_second"] > 0


def test_a_program_that_hangs(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_runs, "LOAD_SECONDS", 1.0)
    [row] = run(target, ["sleep"], seconds=0.5)["peers"]
    assert (row["exit"], row["n_prompts"]) == (TIMED_OUT, 0)
    assert row["reason"].startswith("stopped after")
    assert row["tokens_per_second"] is None


def test_a_kill_by_the_kernel_is_a_result(target: Path) -> None:
    try:
        MemoryCgroup.create(64 * MIB).remove()
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    result = run(target, ["a", "eat"], ("slow", "fast"), enforce=True)
    slow, fast = result["peers"]
    assert (slow["exit"], slow["n_prompts"]) == (OOM_KILLED, 1)
    assert slow["cgroup_peak_bytes"] <= 400 * MIB
    assert "oom-killed: killed by the kernel at the memory limit" in text_of(
        tables("peers", result)
    )


def test_an_interrupted_comparison_keeps_what_it_has(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[dict[str, Any]] = []

    def save(result: dict[str, Any]) -> None:
        saved.append(result)
        if len(saved) == 2:
            raise KeyboardInterrupt

    prompts = [Prompt("a", "x"), Prompt("b", "x")]
    with pytest.raises(KeyboardInterrupt):
        compare(["slow", "fast"], [Weights.of(target)], prompts, settings(), [], save)
    assert [row["n_prompts"] for row in saved[-1]["peers"]] == [1, 1]
    assert set(saved[-1]) == KEYS


def test_a_slow_program_does_fewer_prompts_and_tokens(target: Path) -> None:
    [row] = run(target, ["a", "b"], n_tokens=4000, seconds=0.4)["peers"]
    assert row["exit"] == OK
    assert 2 * 5 <= row["n_tokens"] < 4000
    assert {record["ended"] for record in row["prompts"]} == {"time"}


def test_the_fastest_amount_of_memory_is_found(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    amounts = list(memory_amounts(GIB))
    step = dict(zip(amounts, [None, 3, 1, 2], strict=True))  # milliseconds per token; None: killed
    peer = Peer("tuned", "none", ("hf",), "", tunes=MEMORY)
    calls = []

    def fake(self: Any, prompts: Any, n_tokens: int, seconds: float, tuned: Any) -> Any:
        [amount] = tuned.values()
        calls.append(amount)
        pause = step[amount]
        records = (
            [] if pause is None else [{"arrivals": [(0.0, 1), (pause, 3)], "bytes_read": None}]
        )
        exit_ = OOM_KILLED if pause is None else OK
        return peer_runs.ProcessRun(exit_, 0, 1.0, 0, None, 0, None, 1.0, 1.0, {}, 0, records)

    monkeypatch.setattr(ProgramRunner, "_run", fake)
    runner = ProgramRunner(peer, Weights.of(target), settings(memory_bytes=GIB))
    runner.run([Prompt("a", "x")], 1.0)
    runner.run([Prompt("b", "y")], 1.0)
    assert calls == [*amounts, amounts[2], amounts[2]]
    assert [trial["exit"] for trial in runner.trials] == [OOM_KILLED, OK, OK, OK]
    assisted = Peer("assisted", "none", ("hf",), "", uses_draft=True, tunes=MEMORY)
    other = ProgramRunner(assisted, Weights.of(target), settings(memory_bytes=GIB))
    other.learn_from([None, runner])
    calls.clear()
    other.run([Prompt("a", "x")], 1.0)
    assert calls == [amounts[2]]
    step.update(dict.fromkeys(amounts))
    runner = ProgramRunner(peer, Weights.of(target), settings(memory_bytes=GIB))
    assert runner.run([Prompt("a", "x")], 1.0).exit == OOM_KILLED


def test_the_fastest_chain_of_draft_tokens_is_found_and_reported(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake is faster with longer drafts: a separate program, with its settings in its task."""
    seen: list[dict[str, Any]] = []
    start = ProgramRunner._run

    def run_and_note(self: Any, prompts: Any, n_tokens: int, seconds: float, tuned: Any) -> Any:
        run = start(self, prompts, n_tokens, seconds, tuned)
        assert run.settings["options"] == tuned
        seen.append({**tuned, "n_tokens": n_tokens})
        pause = 1.0 / (tuned["max_draft_tokens"] + tuned["min_draft_probability"])
        slow = [{**record, "arrivals": [(0.0, 1), (pause, 1)]} for record in run.records]
        return replace(run, records=slow)

    monkeypatch.setattr(ProgramRunner, "_run", run_and_note)
    peer = Peer("slow", "fake_slow", ("hf",), "", tunes=DRAFTING, speculates=True)
    monkeypatch.setitem(PEERS, "slow", peer)
    result = run(target, ["a", "b"])
    [row] = result["peers"]
    trial_tokens = peer_runs.TRIAL_SPECULATED_TOKENS
    assert seen == [
        *({**chain, "n_tokens": trial_tokens} for chain in DRAFT_CHAINS),
        *[{**DRAFT_CHAINS[-1], "n_tokens": 10}] * 2,
    ]
    assert [trial["tokens_per_second"] for trial in row["trials"]] == pytest.approx(
        [3.0, 7.0, 15.0, 15.75]
    )
    text = text_of(tables("peers", result))
    assert "max draft tokens 3 min draft probability 0: 3.00 tok/s; " in text


def test_every_process_begins_with_nothing_cached_of_either_model(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = save_model(tmp_path / "draft", seed=2)
    forgotten: list[Path] = []
    monkeypatch.setattr(peer_runs, "forget_model", forgotten.append)
    compare(["slow"], [Weights.of(target, draft)], [Prompt("a", "x")], settings(), [])
    assert forgotten == [target, draft]


@pytest.mark.parametrize(("name", "minimum"), [("slow", 5), ("fast", 16)])
def test_a_program_that_speculates_decodes_more_of_a_prompt(
    target: Path, monkeypatch: pytest.MonkeyPatch, name: str, minimum: int
) -> None:
    tasks: list[Task] = []
    monkeypatch.setattr(Task, "write", lambda self, path: tasks.append(self))
    run(target, ["a"], (name,))
    assert [task.min_tokens for task in tasks] == [minimum]


@pytest.mark.parametrize("budget", [GIB, 2 * GIB, 7 * GIB])
def test_amounts_go_down_and_stay_within_the_budget(budget: int) -> None:
    amounts = list(memory_amounts(budget))
    assert amounts == sorted(set(amounts), reverse=True)
    assert 64 * MIB <= amounts[-1] < amounts[0] < budget


def test_why_a_program_cannot_run(target: Path) -> None:
    weights = Weights("gguf", target / "model.gguf", None)
    assert why_not(PEERS["slow"], weights) == (
        "it runs a Hugging Face checkpoint, which was not given"
    )
    assert why_not(PEERS["specdec"], Weights.of(target)) == "it needs a draft model: give -md"
    assert why_not(PEERS["specdec-plain"], Weights.of(target)) is None


# --- the command ------------------------------------------------------------------------------


def test_command_prints_json_and_writes_it(
    capfd: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "category": "x"}\n{"prompt": "b", "category": "y"}\n')
    file = tmp_path / "peers.json"
    argv = f"peers -m {target} --memory-budget 1GiB --no-enforce --peers fast,absent -n 4 -o json"
    argv += f" --prompts {prompts} --threads 1 --output-file {file}"
    assert main(argv.split()) == 0
    result = json.loads(capfd.readouterr().out)
    assert json.loads(file.read_text()) == result
    assert [row["exit"] for row in result["peers"]] == [OK, NOT_RUN]
    assert result["provenance"]["argv"][:2] == ["specdec-bench", "peers"]
    assert result["weights"][0]["types"] == {"F32": 1.0}


def test_a_draft_that_is_a_part_of_the_target(target: Path, tmp_path: Path) -> None:
    [weights] = all_weights(str(target), "mtp", None, None)
    assert (weights.draft, weights.draft_path) == ("mtp", None)
    assert why_not(PEERS["specdec"], weights) is None
    assisted = replace(PEERS["slow"], uses_draft=True)
    assert why_not(assisted, weights) == "its draft must be a model of its own, which mtp is not"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    both = all_weights(str(target), "mtp", str(file), None)
    assert [weight.draft for weight in both] == ["mtp"] * 2
    assert describe_weights(weights)["draft"] == "mtp"


def test_names_are_listed_once_and_in_order() -> None:
    assert parse_peers("fast, slow,fast") == ["fast", "slow"]
    with pytest.raises(UsageMistake):
        parse_peers("")


def test_the_pairs_draft_comes_in_both_formats(target: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    first, second = all_weights(str(target), "pair:draft", str(file), None)
    assert (first.format, second.format) == ("hf", "gguf")
    assert second.draft is not None
    assert second.draft.suffix == ".gguf"
