"""The GPU measurements run on a CPU: every section works, limits hold, checks compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import PEAK_BYTES, install_fake_gpu

from bench.gpu import machine as cuda_machine
from bench.gpu import suite as cuda_suite
from bench.gpu.checks import checks, lines
from bench.gpu.settings import SECTIONS, Settings, full_settings, tiny_settings
from bench.gpu.suite import do_section, in_child, run_suite, summarise
from specdec.cli.errors import run_app


def in_this_process(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
    result = Path(settings.folder) / f"{name}.json"
    return {**do_section(name, settings, result), "exit": "ok"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the whole suite at tiny size."""
    folder = tmp_path_factory.mktemp("suite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        settings = tiny_settings("cpu", folder)
        actual = run_suite(settings, in_this_process)
    return json.loads(json.dumps(summarise(settings, actual, True, ["suite"])))


@pytest.mark.slow
def test_every_section_runs_on_a_cpu(report: dict[str, Any]) -> None:
    sections = report["sections"]
    assert list(sections) == list(SECTIONS)
    assert {section["exit"] for section in sections.values()} == {"ok"}
    assert not report["is_measurement"]
    for name in ("decode", "three tiers"):
        assert sections[name]["plain"]["passes"] > 0
        assert sections[name]["speculative"]["passes"] > 0  # the policy decides if a draft pays
        assert sections[name]["pass"]["copied_bytes"] == 0
    assert sections["three tiers"]["pass"]["read_seconds"] > 0
    assert sections["peer"]["tokens_per_second"] > 0
    assert sections["fp32"]["equal"] == dict.fromkeys(sections["fp32"]["equal"], True)
    assert len(sections["fp32"]["equal"]) == 4
    assert sections["drift"]["largest_difference"] == 0.0  # the same products of the same rows


@pytest.mark.slow
def test_the_curve_follows_the_acceptance_that_was_asked_for(report: dict[str, Any]) -> None:
    curve = report["sections"]["decode"]["curve"]
    few, all_right = curve["points"]
    assert 1.0 <= few["tokens_per_pass"] < 2.0
    assert all_right["tokens_per_pass"] > 1 + curve["chain_tokens"] / 2


@pytest.mark.slow
def test_a_tiny_run_is_distinguished_from_a_measurement(report: dict[str, Any]) -> None:
    names = {item["name"] for item in report["checks"]}
    assert names == {"fp32 tokens are equal", "bf16 logits of moving layers"}
    assert all(item["holds"] for item in report["checks"])
    assert "the results mean nothing" in lines(report)[0]


def test_a_section_that_takes_too_long_is_killed_and_keeps_what_it_had(tmp_path: Path) -> None:
    actual = in_child("grow", tiny_settings("cpu", tmp_path), 0.05)
    assert actual["exit"] == "timeout"
    assert actual["log"] == []


def test_time_that_is_up_leaves_sections_out(tmp_path: Path) -> None:
    begun: list[tuple[str, float]] = []

    def run(name: str, settings: Settings, seconds: float) -> dict[str, Any]:
        begun.append((name, seconds))
        return {"exit": "ok"}

    settings = full_settings("cuda", tmp_path)
    assert sum(settings.limits.values()) <= cuda_suite.MAX_SECONDS
    actual = run_suite(settings, run, seconds=30.0)
    assert [name for name, _ in begun] == list(SECTIONS)
    assert all(seconds <= 30.0 for _, seconds in begun)
    begun.clear()
    run_suite(settings, run)  # sections that use none of their time
    for number, (name, seconds) in enumerate(begun):
        behind = sum(settings.limits[section] for section in SECTIONS[number + 1 :])
        assert settings.limits[name] <= seconds <= cuda_suite.MAX_SECONDS - behind
    assert begun[-1][1] > cuda_suite.MAX_SECONDS - 10.0
    begun.clear()
    actual = run_suite(settings, run, seconds=0.0)
    assert begun == []
    assert {item["exit"] for item in actual.values()} == {"no time left"}


def test_without_a_gpu_that_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("backends.cuda.engine.cuda_problem", lambda: "no CUDA device")
    assert run_app(cuda_suite.app, "bench.gpu.suite", []) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no CUDA device; --device cpu --tiny" in error
    for argv, text in ((["--device", "tpu"], "must be cpu or cuda"), (["--device", "cpu"], "tiny")):
        assert run_app(cuda_suite.app, "bench.gpu.suite", argv) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_runs_sections_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest run, started as on a machine with a GPU."""
    report, folder = tmp_path / "cuda.json", tmp_path / "targets"
    argv = ["--device", "cpu", "--tiny", "--dir", str(folder), "--output-file", str(report)]
    assert run_app(cuda_suite.app, "bench.gpu.suite", [*argv, "--sections", "grow, machine"]) == 0
    actual = json.loads(report.read_text())
    assert list(actual["sections"]) == ["machine", "grow"]
    assert actual["sections"]["machine"]["device"] == "cpu"
    assert all(item["exit"] == "ok" for item in actual["sections"].values())
    assert actual["provenance"]["versions"]["torch"]
    assert (folder / "small-fp32" / "config.json").exists()
    assert "the results mean nothing" in capsys.readouterr().err
    assert run_app(cuda_suite.app, "bench.gpu.suite", [*argv, "--sections", "decode,all"]) == 2
    assert "--sections has 'all'; there are 'machine', 'grow'" in capsys.readouterr().err


def test_the_settings_of_a_run_reach_its_sections(tmp_path: Path) -> None:
    settings = replace(full_settings("cuda", tmp_path), sections=("decode",))
    settings.write(tmp_path / "task.json")
    assert Settings.read(tmp_path / "task.json") == settings


def results(**changes: Any) -> dict[str, Any]:
    speculative = {"tokens_per_second": 30.0, "vram_peak_bytes": 7, "vram_budget_bytes": 8}
    decode = {"pass": {"versus_copies": 1.05}, "speculative_versus_plain": 9.0}
    actual = {
        "decode": {**decode, "speculative": speculative},
        "three tiers": {"pass": {"versus_the_slower": 1.1}},
        "peer": {"tokens_per_second": 1.5},
        "drift": {"drift_of_rows": 0.1, "largest_difference": 0.05},
        "fp32": {"equal": {"moving": True, "cpu": True}},
    }
    return {**actual, **changes}


def test_what_was_asked_for_is_compared(tmp_path: Path) -> None:
    settings = full_settings("cuda", tmp_path)
    actual = checks(settings, results())
    assert len(actual) == 7
    assert all(item["holds"] for item in actual)
    worse = results(
        decode={
            "pass": {"versus_copies": 1.2},
            "speculative_versus_plain": 7.0,
            "speculative": {
                "tokens_per_second": 3.0, "vram_peak_bytes": 9, "vram_budget_bytes": 8
            },
        },
        drift={"drift_of_rows": 0.1, "largest_difference": 0.2},
        **{"three tiers": {"pass": {"versus_the_slower": 1.2}}},
        fp32={"equal": {"moving": False, "cpu": True}},
    )  # fmt: skip
    assert not any(check["holds"] for check in checks(settings, worse))
    assert checks(settings, {}) == []


def test_what_is_timed_alone_runs() -> None:
    """On the CPU the numbers mean nothing; weights are read where files have them."""
    actual = cuda_machine.alone("cpu", (64, 32), (1, 3), 50)
    assert set(actual) == {"product_seconds", "logits_to_host_seconds"}
    assert {tuple(item) for item in actual["product_seconds"].values()} == {("1", "3")}
    assert tuple(actual["logits_to_host_seconds"]) == ("1", "3")
    (item,) = cuda_machine.attention("cpu", ((4, 2, 16),), (8,), (64,))
    assert (item["kv_heads"], item["n_nodes"], item["n_context"]) == (2, 8, 64)
    assert item["difference"] < 0.1


@pytest.mark.slow
def test_on_a_gpu_layers_are_copied_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake GPU: the measurements mean nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install_fake_gpu(monkeypatch)
    monkeypatch.setattr(cuda_machine, "alone", lambda *shapes: {"product_seconds": {}})
    monkeypatch.setattr(cuda_machine, "attention", lambda *shapes: [])
    settings = replace(tiny_settings("cuda", tmp_path), rates=())
    actual = {
        name: in_this_process(name, settings, 0.0)
        for name in ("machine", "grow", "three tiers", "drift")
    }
    assert actual["machine"]["pinned_copy_bytes_per_second"] == 1e9
    item = actual["three tiers"]
    assert item["pass"]["copied_bytes"] == item["plan"]["copied_bytes_per_pass"] > 0
    assert item["pass"]["copy_seconds"] == item["pass"]["copied_bytes"] / 1e9
    assert item["plain"]["bytes_copied_to_device"] >= item["pass"]["copied_bytes"]
    assert actual["drift"]["largest_difference"] == 0.0
    pinned = {check["name"]: check["value"] for check in checks(settings, actual)}
    assert pinned["VRAM peak, host of 12 GiB"] == PEAK_BYTES
