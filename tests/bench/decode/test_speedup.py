"""`specdec-bench speedup` on a tiny pair: report keys, log, user errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from result_values import speedup
from tiny_pair import save_model

from bench.commands.app import main
from bench.decode.measure import MeasureSpec, _without_probe
from bench.process.child import KILLED, ChildFailed, check_child, run_child
from bench.process.probe import BUFFER_BYTES, BUFFERED, DIRECT
from bench.process.provenance import git_revision
from bench.prompts.workloads import Prompt
from bench.results import compare_tokens
from offload.units import GIB


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("speedup") / "target", seed=1)


@pytest.mark.slow
def test_json_report(
    capfd: pytest.CaptureFixture[str], target: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("bench.decode.measure.REST_SECONDS", 0.0)
    log, report_file = tmp_path / "log.jsonl", tmp_path / "report.json"
    argv = f"speedup -m {target} -md {target} --threads 1 --n-prompts 2 -n 4 --ignore-eos -o json"
    argv += " --num-draft-tokens 3"  # in memory, the policy may choose not to draft
    assert main([*argv.split(), "--log", str(log), "--output-file", str(report_file)]) == 0
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert json.loads(report_file.read_text()) == report
    assert err.count("\n") == 2, err  # one line of progress per prompt
    assert {"plain", "speculative", "speedup", "storage_roofline_fraction", "token_match"} <= set(
        report
    )
    assert {"git_revision", "versions", "argv", "machine"} <= set(report["provenance"])
    assert (report["is_exact"], report["near_ties"], report["token_match"]) == (True, [], 1.0)
    assert report["storage_roofline_fraction"] is None  # it fits in memory
    assert report["storage_probe"] in (DIRECT, BUFFERED)
    assert report["storage_bytes_per_second"] > 0
    for mode in ("plain", "speculative"):
        assert report[mode]["generated_tokens"] == 8
        assert report[mode]["tokens_per_second"] > 0
    assert report["plain"]["mean_acceptance_length"] == 1.0
    assert report["plain_pass_seconds"] > 0
    promised = report["speculative"]["mean_acceptance_length"] * report["plain_pass_seconds"]
    assert report["efficiency"] == pytest.approx(
        report["speedup"] * report["speculative_pass_seconds"] / promised
    )
    assert report["speculative"]["passes"] < report["plain"]["passes"]  # it is its own draft
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["mode"] for record in records] == [
        "plain",
        "speculative",
        "speculative",
        "plain",
    ]
    assert records == report["records"]


@pytest.mark.parametrize("command", ["speedup", "demo"])
@pytest.mark.parametrize("last", [3, 4])
def test_outputs_of_an_exact_target_must_be_equal(
    command: str, last: int, target: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A difference is an error, raised after the report."""
    records = [
        {"prompt": "a", "mode": mode, "token_ids": tokens, "text": "", "stats": {"is_exact": True}}
        for mode, tokens in (("plain", [1, 2, 3]), ("speculative", [1, 2, last]))
    ]
    compared = compare_tokens(records[1:], records[:1])
    result = {**speedup(), "records": records, "is_exact": True, "n_prompts": 1, **compared}
    monkeypatch.setattr("bench.decode.speedup.run_speedup", lambda *_, **__: result)
    monkeypatch.setattr("bench.demo.run_demo", lambda **_: result)
    code = main([command, *(["-m", str(target)] if command == "speedup" else [])])
    out, err = capsys.readouterr()
    if last == 3:
        assert (code, err) == (0, "")
        assert "tokens equal      100 % (1 of 1 prompts wholly)" in out
        assert command != "demo" or "tokens equal 100 %, " in out
    else:
        assert (code, err.count("\n")) == (2, 1)
        assert "two outputs for a differ from token 2 on" in err
        assert "tokens equal      66.6 % (0 of 1 prompts wholly)" in out
        assert "a differs from token 2 on: an ERROR, the target is exact" in out


@pytest.mark.slow
@pytest.mark.gguf
def test_gguf_models(capfd: pytest.CaptureFixture[str]) -> None:
    """GGUF models take the same options."""
    pytest.importorskip("llama_cpp")
    argv = "speedup -m pair:draft.gguf -md pair:draft.gguf --threads 1 --n-prompts 1 -n 6 -o json"
    assert main([*argv.split(), "--ignore-eos", "--num-draft-tokens", "3"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["token_match"] == 1.0
    assert report["speculative"]["passes"] < report["plain"]["passes"] == 5
    assert report["model"].endswith(".gguf")


def test_a_failure_of_the_measurement_is_reported_once(
    capfd: pytest.CaptureFixture[str], target: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(target, damaged)
    (damaged / "config.json").unlink()
    assert main(["speedup", "-m", str(damaged), "-n", "2", "--n-prompts", "1"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "config.json" in err


@pytest.mark.parametrize("argv", [[], ["--help"], ["synth", "--help"], ["demo", "--help"]])
def test_help(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert main(argv) == 0
    assert "specdec-bench" in capsys.readouterr().out


def test_demo_refuses_a_budget_above_half(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--size", "2GB", "--memory-budget", "1.5GB"]) == 2
    assert "more than half" in capsys.readouterr().err


def test_demo_checks_the_disk_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--size", "1000TB", "--dir", str(tmp_path)]) == 2
    assert "--dir" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_probes_buffers_come_out_of_the_budget() -> None:
    load = {"model": "m", "memory_budget": "1GiB"}
    for given, budget, probes in (
        (load, GIB - BUFFER_BYTES, True),
        (load, "1GiB", False),
        ({**load, "memory_budget": "auto"}, "auto", True),
    ):
        spec = MeasureSpec(given, [], {}, probes=probes)
        assert _without_probe(spec)["memory_budget"] == budget


def test_a_specification_survives_its_transfer_to_a_process() -> None:
    spec = MeasureSpec({"model": "m"}, [Prompt("a", "text\u20ac")], {"max_tokens": 3}, "log")
    assert MeasureSpec.of(json.loads(json.dumps(asdict(spec)))) == spec


# --- child processes ------------------------------------------------------------------------------


def test_exit_codes_of_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_module.py").write_text("import os, sys; exec(sys.argv[1])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_child("child_module", ["sys.exit(3)"], None) == 3
    assert run_child("child_module", ["os.kill(os.getpid(), 9)"], None) == KILLED
    with pytest.raises(KeyboardInterrupt):
        check_child(130, "it")
    with pytest.raises(typer.Exit, match="137"):
        check_child(KILLED, "it")
    with pytest.raises(ChildFailed, match="it failed with exit code 1"):
        check_child(1, "it")
    check_child(0, "it")


def test_git_revision_only_of_our_own_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=False)
    assert git_revision(tmp_path) is None


def test_measuring_process_tells_a_mistake_in_one_line(tmp_path: Path) -> None:
    paths = [str(tmp_path / "none"), str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "bench.decode.measure", *paths],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
