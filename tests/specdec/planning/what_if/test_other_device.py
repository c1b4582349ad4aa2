"""Plans for devices other than this one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from paper_models import PaperModel, on_paper_gpus

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute
from offload.units import GIB, MIB
from specdec.checks import ConfigError
from specdec.devices.spec import PRESETS, DeviceError, complete
from specdec.models.opened import OpenedPair
from specdec.planning.what_if import other_device
from specdec.planning.what_if.other_device import DevicePlan, plan_on

HERE = ComputeCurve.linear(1e-12, 1e-15)
TARGET = PaperModel("t", 40, 40 * MIB, kv_bytes_per_token=1000, curve=HERE, can_use_gpu=True)
"""Budget of 3.1 GiB."""
DRAFT = PaperModel("d", 4, MIB, kv_bytes_per_token=100, curve=HERE, can_use_gpu=True)


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> None:
    on_paper_gpus(monkeypatch)
    opened = OpenedPair(SimpleNamespace(source=TARGET), SimpleNamespace(source=DRAFT))
    monkeypatch.setattr(other_device, "open_to_plan", lambda options: opened)
    monkeypatch.setattr(other_device, "ThisMachine", lambda *arguments: machine(2 * GIB))
    # Earlier tests in this process must not count.
    taken = SimpleNamespace(rss_bytes=500 * MIB)
    monkeypatch.setattr("specdec.planning.memory.base.process_memory", lambda: taken)


def machine(memory_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(
        storage_bytes_per_second=7e9,
        dram_bytes_per_second=1e12,
        flops_per_second={"F16": 1e15},
        memory_bytes=memory_bytes,
    )


def plan(name: str, **options: object) -> DevicePlan:
    return plan_on(name, "t", "d", ctx_size=256, **options)


def test_a_storage_alone_takes_the_rest_from_this_machine():
    actual = plan("sd-card", memory_budget="1.5GiB")
    streamed = actual.plan.decoding.target.placement.streamed_bytes
    assert actual.plan.pass_seconds(1) == pytest.approx(streamed / 90e6, rel=0.01)
    assert actual.plan.budget_bytes == 3 * GIB // 2
    first = actual.lines()[0]
    assert first.startswith("on sd-card: storage 0.09 GB/s; of this machine: ")
    assert "flops per second" in first


def test_what_is_read_from_a_slow_storage_is_what_an_upgrade_helps():
    actual = plan("sd-card", memory_budget="1.5GiB")
    now = actual.plan.predicted_tokens_per_second
    speeds = actual.upgrades
    assert speeds["storage bandwidth"] == pytest.approx(2 * now, rel=0.02)
    compute = next(speed for name, speed in speeds.items() if name.startswith("compute"))
    assert compute == pytest.approx(now, rel=0.02)
    ranked = list(speeds.values())
    assert ranked == sorted(ranked, reverse=True)
    assert actual.lines()[-1] == f"most useful upgrade: {next(iter(speeds))}"
    # Twice the memory nearly fits the target: better than twice its read speed.
    assert next(iter(speeds)).startswith("memory budget (3.00 GiB)")


def test_a_whole_device_has_its_own_arithmetic_and_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PaperModel, "measure_compute", None)  # is not requested
    actual = plan("phone")
    assert actual.device.from_this_machine == ()
    assert actual.plan.budget_bytes == 8 * GIB
    # All of it in memory: a pass reads the weights from there, at 28 GB/s.
    n_bytes = 40 * 80 * MIB + TARGET.head_bytes
    assert actual.plan.pass_seconds(1) == pytest.approx(n_bytes / 28e9, rel=0.01)
    values = json.loads(json.dumps(actual.to_dict()))
    assert values["device"]["name"] == "phone"
    assert len(values["upgrades"]) == 3


def test_decoding_takes_as_much_longer_as_memory_is_slower(monkeypatch: pytest.MonkeyPatch):
    before = plan("phone").plan.pass_seconds(1)
    monkeypatch.setattr(PaperModel, "decode_seconds", lambda _: 0.002)
    slower = 1e12 / 28e9
    after = plan("phone").plan.pass_seconds(1)
    assert after - before == pytest.approx(0.002 * slower, rel=0.02)


def test_where_nothing_helps_that_is_said(monkeypatch: pytest.MonkeyPatch):
    actual = plan("phone")
    best = max(actual.upgrades.values())
    upgrades = {name: speed / best * 0.1 for name, speed in actual.upgrades.items()}
    slower = DevicePlan(actual.plan, actual.device, upgrades)
    assert slower.lines()[-1] == "no single upgrade would help"


def test_a_device_with_a_gpu_computes_there():
    actual = plan("gpu-8gb", memory_budget="4GiB", vram_budget="2GiB", parallel=1)
    item = actual.plan
    assert (item.device, item.draft_device) == ("cuda", "cuda")
    assert (item.vram_budget_bytes, item.vram_source) == (2 * GIB, "as asked")
    # Weights beyond 2 GiB of VRAM are pinned: a pass waits for their copies.
    copied = item.placement.moved_bytes
    assert copied > GIB
    assert item.placement.streamed_bytes / 3e9 < copied / 12.5e9
    assert item.pass_seconds(1) == pytest.approx(copied / 12.5e9, rel=0.02)
    lines = actual.lines()
    assert "copies to its GPU 12.50 GB/s" in lines[0]
    assert any(line.startswith("VRAM budget 2.00 GiB (as asked)") for line in lines)
    upgrades = {name.split(" (")[0] for name in actual.upgrades}
    assert upgrades == {
        "storage bandwidth", "memory budget", "compute", "bandwidth to the GPU", "VRAM"
    }  # fmt: skip
    assert next(iter(actual.upgrades)).startswith(("VRAM", "bandwidth to the GPU"))


def test_all_of_a_gpu_is_taken_where_no_budget_is_given():
    actual = plan("gpu-8gb")
    assert actual.plan.vram_budget_bytes == 8 * GIB
    assert actual.plan.placement.n_moving_layers == 0
    values = json.loads(json.dumps(actual.to_dict()))
    assert sum(values["vram"].values()) == 8 * GIB
    assert values["copied_bytes_per_pass"] == 0
    speed = actual.plan.predicted_tokens_per_second
    assert f"predicted {speed:.2f} tokens/s, with all weights in memory" in actual.lines()


def test_what_a_gpu_profile_cannot_tell_is_refused():
    with pytest.raises(DeviceError, match="leave draft_device out"):
        plan("gpu-8gb", draft_device="cpu")
    for options in ({"vram_budget": "2GiB"}, {"draft_device": "cuda"}):
        with pytest.raises(ConfigError, match="computed on the CPU"):
            plan("phone", **options)
    with pytest.raises(DeviceError, match="phone has no VRAM: leave it out"):
        plan("phone", device="cuda")
    with pytest.raises(ConfigError, match=r"of 16.00 GiB is above the VRAM of gpu-8gb, 8192 MiB"):
        plan("gpu-8gb", vram_budget="16GiB")
    with pytest.raises(DeviceError, match="no device 'abacus'"):
        plan("abacus")


def test_a_head_without_layers_has_the_targets_arithmetic(monkeypatch: pytest.MonkeyPatch):
    head = PaperModel("h", 0, MIB)
    opened = OpenedPair(SimpleNamespace(source=TARGET), SimpleNamespace(source=head))
    monkeypatch.setattr(other_device, "open_to_plan", lambda options: opened)
    actual = plan("phone").plan
    n_bytes = TARGET.head_bytes + 40 * 2 * 40 * MIB
    expected = actual.cost_model.seconds(1) * head.head_bytes / n_bytes
    assert actual.draft_cost_model.seconds(1) == pytest.approx(expected, rel=0.01)


def test_a_device_has_a_name() -> None:
    with pytest.raises(ConfigError, match="on is 5, must be str"):
        plan_on(5, "t")  # type: ignore[arg-type]


def test_a_device_is_looked_for_before_any_model_is_opened(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(other_device, "open_to_plan", None)
    with pytest.raises(DeviceError, match="no device 'abacus'"):
        plan("abacus")


def test_a_budget_above_the_devices_memory_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"memory budget of 16.00 GiB is above the memory of "
        r"raspberry-pi-5, 8192 MiB \(8.00 GiB\): lower memory_budget to that",
    ):
        plan("raspberry-pi-5", memory_budget="16GiB")
    with pytest.raises(ConfigError, match=r"above the memory of sd-card, 2048 MiB"):
        plan("sd-card", memory_budget="3GiB")  # minus this machine's share
    assert plan("raspberry-pi-5", memory_budget="8GiB").plan.budget_bytes == 8 * GIB


SLOWED = ComputeCurve((1,), (1e-10,), (2e-10,))  # 0.3 s a pass, 0.6 s beside reads at 7 GB/s


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the timed models, and whether beside reads."""
    asked: list[bool] = []

    def measure(model: PaperModel, beside_reads: bool = True) -> ModelCompute:
        asked.append(beside_reads)
        curve = SLOWED if beside_reads else ComputeCurve((1,), SLOWED.alone, SLOWED.alone)
        return ModelCompute(curve, model.head_bytes)

    monkeypatch.setattr(PaperModel, "measure_compute", measure)
    return asked


def test_arithmetic_beside_reads_is_slower_as_in_plans_of_this_machine(
    slowed: list[bool], tmp_path: Path
):
    own_storage = tmp_path / "same.json"
    own_storage.write_text('{"storage_bytes_per_second": 7e9}')
    actual = plan(str(own_storage), memory_budget="1.5GiB").plan
    assert slowed == [True, False]  # the target streams, the draft does not
    here = replace(actual.decoding.target, compute=ModelCompute(SLOWED, TARGET.head_bytes))
    assert actual.pass_seconds(1) == here.seconds(1)
    alone = ComputeCurve((1,), SLOWED.alone, SLOWED.alone)
    unslowed = replace(actual.decoding.target, compute=ModelCompute(alone, TARGET.head_bytes))
    assert actual.pass_seconds(1) > 1.2 * unslowed.seconds(1)


def target_curve(storage: str, memory_bytes: int) -> ComputeCurve:
    here = machine(memory_bytes)
    opened = OpenedPair(SimpleNamespace(source=TARGET), None)
    device = complete(PRESETS[storage], here)
    return other_device.measurements_of(device, here, opened, None, memory_bytes).target.per_byte


@pytest.mark.parametrize(
    ("storage", "factor"), [("sd-card", 1 + 0.09 / 7), ("nvme-gen3", 1 + 3 / 7), ("nvme-gen5", 2.0)]
)
def test_a_slower_storage_costs_the_arithmetic_less(
    slowed: list[bool], storage: str, factor: float
):
    assert target_curve(storage, 2 * GIB).beside_factor(1) == pytest.approx(factor)
    assert slowed == [True]


def test_a_target_in_memory_is_not_timed_beside_reads(slowed: list[bool]):
    assert target_curve("nvme-gen3", 8 * GIB).beside_factor(1) == 1.0
    assert slowed == [False]
