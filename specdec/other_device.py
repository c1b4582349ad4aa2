"""`specdec plan --on DEVICE`: the plan for another machine, and which part to improve there.

What is known of the device takes the place of what would be measured here; what is not (a preset of
a storage alone) is this machine's. The most useful upgrade is found by planning again with each
figure doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backends.compute_profile import ComputeCurve
from backends.source import ModelCompute, ModelSource
from offload.units import format_bytes, parse_bytes
from specdec.alternatives import Figures
from specdec.device_file import find_device
from specdec.devices import DeviceError, DeviceSpec, complete
from specdec.options import RunOptions, run_options
from specdec.planning import OpenedPair, make_plan, open_pair
from specdec.run_plan import RunPlan
from specdec.this_machine import ThisMachine, matrix_formats

_ARITHMETIC = {"dram_bytes_per_second", "flops_per_second"}
_NO_GAIN = 1.02


@dataclass(frozen=True)
class Upgrade:
    """One figure doubled."""

    name: str
    tokens_per_second: float


@dataclass(frozen=True)
class DevicePlan:
    """A plan for a device, and what would make it faster."""

    plan: RunPlan
    device: DeviceSpec
    upgrades: tuple[Upgrade, ...]
    """The most useful first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "device": self.device.to_dict(),
            "upgrades": {one.name: one.tokens_per_second for one in self.upgrades},
        }

    def lines(self) -> list[str]:
        device = self.device
        lines = [f"on {device.name}: storage {device.storage_bytes_per_second / 1e9:.2f} GB/s"]
        if device.from_this_machine:
            names = ", ".join(name.replace("_", " ") for name in device.from_this_machine)
            lines[0] += f"; of this machine: {names}"
        return [*lines, *self.plan.lines(), *self._upgrade_lines()]

    def _upgrade_lines(self) -> list[str]:
        now = self.plan.predicted_tokens_per_second
        lines = [
            f"twice the {one.name}: {one.tokens_per_second:.2f} tokens/s "
            f"({one.tokens_per_second / now:.2f}x)"
            for one in self.upgrades
        ]
        best = self.upgrades[0]
        if best.tokens_per_second < _NO_GAIN * now:
            return [*lines, "no single figure doubled would help"]
        return [*lines, f"most useful upgrade: {best.name}"]


def plan_on(
    device_name: str, model: str | Path, draft_model: str | Path | None = None, **options: Any
) -> DevicePlan:
    """What `plan_run` would say on another device; a budget of "auto" is all of its memory.

    Raises DeviceError and what `plan_run` raises.
    """
    asked = run_options(model, draft_model, **options)
    pair = open_pair(asked)
    device = _find(device_name, asked, pair)
    figures = _figures(device, pair)
    if asked.memory_budget == "auto":
        total_bytes, source = device.memory_bytes, f"all memory of {device.name}"
    else:
        total_bytes, source = parse_bytes(asked.memory_budget), "as asked"

    def plan_for(changed: Figures, n_bytes: int) -> RunPlan:
        return make_plan(asked, pair, changed, n_bytes, source)

    plan = plan_for(figures, total_bytes)
    doubled = {
        "storage bandwidth": (
            replace(figures, storage_bytes_per_second=2 * figures.storage_bytes_per_second),
            total_bytes,
        ),
        f"memory budget ({format_bytes(2 * total_bytes)})": (figures, 2 * total_bytes),
        "compute (arithmetic and memory bandwidth)": (_twice_as_fast(figures), total_bytes),
    }
    upgrades = [
        Upgrade(name, plan_for(*change).predicted_tokens_per_second)
        for name, change in doubled.items()
    ]
    upgrades.sort(key=lambda one: -one.tokens_per_second)
    return DevicePlan(plan, device, tuple(upgrades))


def _find(name: str, options: RunOptions, pair: OpenedPair) -> DeviceSpec:
    target = pair.target.source
    records = [record for layer in target.layers for record in layer.tensors]
    machine = ThisMachine(target.path, matrix_formats(records), options.backend.n_threads)
    device = complete(find_device(name), machine)
    if device.vram_bytes:
        raise DeviceError(
            f"{name} computes on a GPU, which plans do not know: `specdec analyze --on {name}` "
            "says what binds there"
        )
    return device


def _figures(device: DeviceSpec, pair: OpenedPair) -> Figures:
    target, draft = pair.sources
    return Figures(
        device.storage_bytes_per_second,
        _compute(device, target),
        None if draft is None else _compute(device, draft),
    )


def _compute(device: DeviceSpec, source: ModelSource) -> ModelCompute:
    """The device's own, or where only its storage is known, what is measured here."""
    if set(device.from_this_machine) >= _ARITHMETIC:
        return source.measure_compute(beside_reads=False)
    records = [record for layer in source.layers for record in layer.tensors]
    n_bytes = sum(record.n_bytes for record in records)
    one = device.pass_compute(records)
    curve = ComputeCurve.linear(one.fixed_seconds / n_bytes, one.seconds_per_row / n_bytes)
    return ModelCompute(curve, source.head_bytes)


def _twice_as_fast(figures: Figures) -> Figures:
    def twice(compute: ModelCompute) -> ModelCompute:
        return replace(compute, per_byte=compute.per_byte.times(0.5))

    draft = None if figures.draft is None else twice(figures.draft)
    return replace(figures, target=twice(figures.target), draft=draft)
