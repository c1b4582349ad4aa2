"""`specdec plan --on DEVICE`: the plan for another machine, and which part to improve there.

The device's profile replaces measurements; values that it lacks (a preset may describe a storage
alone) are measured on this machine. The most useful upgrade is found by planning again with each
value doubled.

A device with VRAM computes on its GPU: its profile describes no other arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from backends.contract.curve import ComputeCurve
from backends.contract.source import ModelCompute, ModelSource
from backends.timing.measure import matrix_formats
from offload.formats.outline import is_outline
from offload.units import GIB, format_bytes, format_down
from specdec.checks import check_type, refuse_unknown
from specdec.devices.file import find_device
from specdec.devices.spec import DeviceError, DeviceSpec, Machine, complete
from specdec.devices.this_machine import ThisMachine
from specdec.models.opened import Sources
from specdec.planning.candidate_cost import measure_draft
from specdec.planning.gpu import check_no_gpu_options, gpu_for
from specdec.planning.keywords import LoadKeywords
from specdec.planning.measurements import Measurements, layer_bytes, measure_experts, must_stream
from specdec.planning.memory.base import asked_budget, measure_base
from specdec.planning.memory.memory_plan import Gpu
from specdec.planning.opening import open_to_plan
from specdec.planning.plan import make_plan
from specdec.planning.run_plan import RunPlan
from specdec.run_options import AUTO, CPU, CUDA, RunOptions

_ARITHMETIC = {"dram_bytes_per_second", "flops_per_second"}
_NO_GAIN = 1.02
_CUDA_HOST_BYTES = GIB
"""Assumed host memory of a GPU's libraries; on the device itself it is measured."""


@dataclass(frozen=True)
class DevicePlan:
    """A plan for another device, and the speeds with upgrades."""

    plan: RunPlan
    device: DeviceSpec
    upgrades: dict[str, float]
    """Tokens per second with one value doubled, the most useful first."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.plan.to_dict(),
            "device": self.device.to_dict(),
            "upgrades": self.upgrades,
        }

    def lines(self) -> list[str]:
        device = self.device
        lines = [f"on {device.name}: storage {device.storage_bytes_per_second / 1e9:.2f} GB/s"]
        if device.pcie_bytes_per_second:
            lines[0] += f", copies to its GPU {device.pcie_bytes_per_second / 1e9:.2f} GB/s"
        if device.from_this_machine:
            names = ", ".join(name.replace("_", " ") for name in device.from_this_machine)
            lines[0] += f"; of this machine: {names}"
        lines += self.plan.lines()
        if not self.plan.placement.n_moving_layers:  # then the plan's own lines give no speed
            speed = self.plan.predicted_tokens_per_second
            lines.append(f"predicted {speed:.2f} tokens/s, with all weights in memory")
        return [*lines, *self._upgrade_lines()]

    def _upgrade_lines(self) -> list[str]:
        now = self.plan.predicted_tokens_per_second
        lines = [
            f"twice the {name}: {speed:.2f} tokens/s ({speed / now:.2f}x)"
            for name, speed in self.upgrades.items()
        ]
        best = next(iter(self.upgrades))
        if self.upgrades[best] < _NO_GAIN * now:
            return [*lines, "no single upgrade would help"]
        return [*lines, f"most useful upgrade: {best}"]


def plan_on(
    device_name: str,
    model: str | Path,
    draft_model: str | Path | None = None,
    **options: Unpack[LoadKeywords],
) -> DevicePlan:
    """Plan a run as `plan_run` would on another device; a budget of "auto" is all of its memory.

    Raises DeviceError and what `plan_run` raises.
    """
    check_type("on", device_name, str)
    known = find_device(device_name)
    refuse_unknown(options, RunOptions, "plan_on()")
    asked = RunOptions(model, draft_model, **options)
    pair = open_to_plan(asked)
    target = pair.sources[0]
    formats = matrix_formats(target.multiplied)
    machine = ThisMachine(target.path, formats, asked.backend.n_threads)
    device = complete(known, machine)
    gpu = _gpu(device, asked, pair)
    total_bytes, source = device.memory_bytes, f"all memory of {device.name}"
    if asked.memory_budget != AUTO:
        whose = f"the memory of {device.name}, {format_down(device.memory_bytes)}"
        total_bytes = asked_budget("memory", asked.memory_budget, device.memory_bytes, whose)
        source = "as asked"
    base_bytes = measure_base(*pair.sources)  # before anything is timed, as in a run
    measurements = measurements_of(device, machine, pair, gpu, total_bytes)

    def plan_for(
        changed: Measurements = measurements,
        n_bytes: int = total_bytes,
        other_gpu: Gpu | None = gpu,
    ) -> RunPlan:
        return make_plan(
            asked, pair, changed, n_bytes, source, base_bytes, other_gpu, uses_statistics=False
        )

    plan = plan_for()
    storage = replace(
        measurements, storage_bytes_per_second=2 * measurements.storage_bytes_per_second
    )
    doubled = {
        "storage bandwidth": plan_for(storage),
        f"memory budget ({format_bytes(2 * total_bytes)})": plan_for(n_bytes=2 * total_bytes),
        "compute (arithmetic and memory bandwidth)": plan_for(_twice_as_fast(measurements)),
    }
    if gpu is not None:
        link = replace(measurements, copy_bytes_per_second=2 * measurements.copy_bytes_per_second)
        larger = replace(gpu, vram_bytes=2 * gpu.vram_bytes)
        doubled["bandwidth to the GPU"] = plan_for(link)
        doubled[f"VRAM ({format_bytes(larger.vram_bytes)})"] = plan_for(other_gpu=larger)
    speeds = {name: upgraded.predicted_tokens_per_second for name, upgraded in doubled.items()}
    return DevicePlan(plan, device, dict(sorted(speeds.items(), key=lambda item: -item[1])))


def _gpu(device: DeviceSpec, options: RunOptions, pair: Sources) -> Gpu | None:
    if not device.vram_bytes:
        if options.device == CUDA:
            raise DeviceError(
                f"device is 'cuda', but {device.name} has no VRAM: leave it out, or name a device "
                "with a GPU (gpu-8gb, gpu-24gb, or a file with vram_bytes)"
            )
        check_no_gpu_options(replace(options, device=CPU))
        return None
    if options.draft_device == CPU and pair.sources[1] is not None:
        raise DeviceError(
            f"{device.name} describes its GPU's arithmetic and not its CPU's: plan with "
            "the draft on the GPU too (leave --draft-device out)"
        )
    on_gpu = replace(options, draft_device=CUDA)
    n_bytes, source = device.vram_bytes, f"all VRAM of {device.name}"
    if options.vram_budget != AUTO:
        whose = f"the VRAM of {device.name}, {format_down(n_bytes)}"
        n_bytes, source = asked_budget("VRAM", options.vram_budget, n_bytes, whose), "as asked"
    remedy = "plan for a device without a GPU"
    return gpu_for(on_gpu, pair, n_bytes, source, _CUDA_HOST_BYTES, remedy)


def measurements_of(
    device: DeviceSpec, machine: Machine, pair: Sources, gpu: Gpu | None, total_bytes: int
) -> Measurements:
    """Return a device's measurements for these models, completed by those of this machine."""
    target, draft = pair.sources if gpu is None else (gpu.target, gpu.draft)
    beside_reads = gpu is None and must_stream(target, total_bytes)
    compute, drafting = _compute(device, machine, target, target, beside_reads), None
    if draft is not None:
        is_here = _computes_here(device)
        drafting = measure_draft(draft) if is_here else _compute(device, machine, draft, target)
    storage = device.storage_bytes_per_second
    if gpu is not None:
        return Measurements(storage, compute, None, drafting, device.pcie_bytes_per_second or 0.0)
    if compute.per_byte.is_slowed_by_reads:
        share = min(1.0, storage / machine.storage_bytes_per_second)
        compute = replace(compute, per_byte=compute.per_byte.beside_fewer_reads(share))
    missing = _expert_seconds(machine, target, total_bytes)
    return Measurements(storage, compute, drafting, expert_seconds_per_byte=missing)


def _expert_seconds(machine: Machine, target: ModelSource, total_bytes: int) -> float:
    """Return this machine's extra seconds per byte of missing experts; profiles lack them."""
    if not any(target.experts) or is_outline(target.weight_file):
        return 0.0  # then this machine's storage need not be measured
    return measure_experts(target, total_bytes, machine.storage_bytes_per_second)


def _computes_here(device: DeviceSpec) -> bool:
    """Return whether the profile lacks the device's arithmetic, so that it is measured here."""
    return set(device.from_this_machine) >= _ARITHMETIC


def _compute(
    device: DeviceSpec,
    machine: Machine,
    source: ModelSource,
    target: ModelSource,
    beside_reads: bool = False,
) -> ModelCompute:
    """Return the device's arithmetic, or this machine's where only the device's storage is known.

    target: model whose layers a source without layers of its own shares.

    Dequantizing and recurrent states move bytes: they are measured here and scaled by the ratio of
    memory bandwidths.
    """
    if _computes_here(device):
        return source.measure_compute(beside_reads)
    whole = source if source.layers else target
    n_bytes = layer_bytes(whole)
    parts = [(1 / n_bytes, device.compute_curve(whole.multiplied))]
    moved = [whole.measure_states(), *_decoding(whole)]
    if any(moved):
        slower = machine.dram_bytes_per_second / device.dram_bytes_per_second
        parts += [(slower / n_bytes, curve) for curve in moved if curve is not None]
    return ModelCompute(ComputeCurve.mixed(parts), source.head_bytes)


def _decoding(source: ModelSource) -> list[ComputeCurve]:
    seconds = source.decode_seconds()
    return [ComputeCurve.linear(seconds, 0.0)] if seconds else []


def _twice_as_fast(measurements: Measurements) -> Measurements:
    draft, gpu_draft = (
        None if compute is None else compute.times(0.5)
        for compute in (measurements.draft, measurements.gpu_draft)
    )
    return replace(
        measurements, target=measurements.target.times(0.5), draft=draft, gpu_draft=gpu_draft
    )
