"""`specdec analyze` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model

from specdec.cli.app import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), seed=1)


def analyzed(capsys: pytest.CaptureFixture[str], model: Path, *more: str) -> dict[str, Any]:
    assert main(["analyze", "-m", str(model), "--on", "laptop", "--json", *more]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_all_phases_by_default(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    value = analyzed(capsys, model, "-c", "50")
    sizes = {name: (item["n_tokens"], item["ctx_size"]) for name, item in value["phases"].items()}
    assert sizes == {"decode": (1, 50), "verify": (16, 50), "prefill": (50, 50)}
    assert value["kv_bytes"] == 50 * value["kv_bytes_per_token"] > 0
    for phase in value["phases"].values():
        operators = phase["operators"]
        assert sum(operator["share"] for operator in operators.values()) == pytest.approx(1.0)
        for key in ("count", "flops", "memory_operations", "bytes", "stored_bytes"):
            assert phase["total"][key] == sum(operator[key] for operator in operators.values())
    decode = value["phases"]["decode"]
    assert value["plain_tokens_per_second_limit"] == pytest.approx(1 / decode["seconds"])
    assert value["bandwidth_tokens_per_second_limit"] >= value["plain_tokens_per_second_limit"]
    assert 1 <= value["free_tokens"] <= 50
    assert value["model"] == str(model)


def test_the_embedded_model_is_called_as_it_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "-m", "pair:draft", "--on", "laptop"]) == 0
    assert capsys.readouterr().out.startswith("model    pair:draft (llama): ")


def test_all_logits_of_a_tree_are_wanted_and_one_of_a_prompt(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    phases = analyzed(capsys, model, "-c", "50")["phases"]
    flops = {name: item["operators"]["head"]["flops"] for name, item in phases.items()}
    assert flops["verify"] == 16 * flops["decode"]
    assert flops["prefill"] == flops["decode"] > 0


def test_the_limit_by_bandwidth_is_the_slowest_transfer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: Path
) -> None:
    """The bandwidth limit counts on a device whose arithmetic takes longer than any transfer."""
    slow = {"name": "slow", "storage_bytes_per_second": 1e9, "dram_bytes_per_second": 1e10}
    device = tmp_path / "slow.json"
    flops = {"default": 1e6}
    device.write_text(json.dumps({**slow, "flops_per_second": flops, "memory_bytes": 1000}))
    assert main(["analyze", "-m", str(model), "--on", str(device), "--json", "-c", "50"]) == 0
    value = json.loads(capsys.readouterr().out)
    seconds = value["phases"]["decode"]["tier_seconds"]
    assert 1 / value["bandwidth_tokens_per_second_limit"] == pytest.approx(seconds["storage"])
    assert value["bound_by"] == "compute"
    assert seconds["compute"] > seconds["storage"] > seconds["memory"] > 0


def test_one_phase_of_a_size(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    value = analyzed(capsys, model, "--phase", "prefill", "-n", "7")
    assert list(value["phases"]) == ["prefill"]
    assert value["phases"]["prefill"]["n_tokens"] == 7
    assert value["phases"]["prefill"]["ctx_size"] == 7


def test_a_smaller_budget_streams(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert analyzed(capsys, model)["streamed_bytes_per_pass"] == 0
    value = analyzed(capsys, model, "--memory-budget", "1B", "-c", "8")
    assert value["streamed_bytes_per_pass"] == value["layer_bytes"] > 0
    assert value["device"]["memory_bytes"] == 1
    assert any("cannot run" in note for note in value["notes"])


def test_this_machine(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert main(["analyze", "-m", str(model)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for part in ("this machine", "QKV projections", "feed-forward", "verify: 16 tokens", "free"):
        assert part in out
    assert max(map(len, out.splitlines()[6:])) <= 100


def test_what_comes_from_this_machine_is_said(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    assert main(["analyze", "-m", str(model), "--on", "sd-card"]) == 0
    assert "of this machine: dram, flops, memory" in capsys.readouterr().out


def test_a_longer_context_than_the_models_is_cut(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    argv = ["analyze", "-m", str(model), "--on", "laptop", "--json", "-c", "99999999"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ctx_size"] == json.loads(out)["max_context"]
    assert "--ctx-size 99999999 is cut to the model's" in err
