"""`specdec plan`, `profile` and `demo`: information about a model and this machine."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from offload.units import format_bytes
from specdec.cli import options
from specdec.cli.enforce import run_benchmark
from specdec.cli.groups import Model, PlannedLoad, with_options
from specdec.cli.libraries import import_for_good
from specdec.cli.notes import check_models, note_plan
from specdec.cli.output import write_json, write_text
from specdec.cli.progress import waiting
from specdec.run_options import CPU, CUDA

if TYPE_CHECKING:
    from specdec.devices.this_machine import ThisGpu


ProfileDevice = Annotated[
    str, typer.Option("--device", metavar="cpu|cuda", help="Device whose arithmetic is timed.")
]
Refresh = Annotated[bool, typer.Option("--refresh", help="Measure again, ignoring the cache.")]
DemoArguments = Annotated[
    list[str] | None,
    typer.Argument(help="Passed on to `specdec-bench demo`.", show_default=False),
]


Machines = Annotated[
    int | None,
    typer.Option(
        "--machines",
        min=1,
        help="Also estimate a batch on so many machines like the planned one.",
        show_default="one",
    ),
]


@with_options
def plan(
    load: PlannedLoad,
    on: options.OnDevice = None,
    machines: Machines = None,
    json: options.Json = False,
) -> None:
    """Show the memory plan, the alternatives, and the predicted speed."""
    check_models(load)
    keywords, elsewhere = load.keywords(), None
    with waiting(f"planning {load.model}"):
        import specdec.api  # noqa: F401  # the memory of a run's own modules counts in its plan
        from specdec.planning.plan import plan_run
        from specdec.planning.what_if.machines import Machines as SeveralMachines
        from specdec.planning.what_if.other_device import plan_on
        from specdec.planning.what_if.together import Together, plan_together

        if on is None:
            import_for_good(load)
            here = plan_run(**keywords)
        else:  # the weights need not be there
            elsewhere = plan_on(on, **keywords)
            here = elsewhere.plan
    note_plan(load, here)
    result = elsewhere or here
    more: dict[str, Together | SeveralMachines] = {}
    if here.max_num_seqs > 1:
        more["together"] = plan_together(here, here.max_num_seqs, load.spec.width)
    if machines is not None:
        more["machines"] = SeveralMachines(machines, here)
    if json:
        write_json({**result.to_dict(), **{name: item.to_dict() for name, item in more.items()}})
    else:
        lines = result.lines() + [line for item in more.values() for line in item.lines()]
        write_text("\n".join(lines) + "\n")


@with_options
def profile(
    model: Model,
    device: ProfileDevice = CPU,
    refresh: Refresh = False,
    json: options.Json = False,
) -> None:
    """Measure this machine's storage and arithmetic; --json prints a device for --on."""
    from backends.timing.cached import forget_curves
    from offload.ring.bandwidth import is_in_disk_cache, measure_storage, why_not_cached
    from specdec.devices.this_machine import ThisGpu, ThisMachine, model_formats
    from specdec.models.names import resolve_model
    from specdec.models.weight_files import largest_weight_file

    if device not in (CPU, CUDA):
        raise options.OptionError(f"--device is {device!r}, must be cpu or cuda")
    path = resolve_model(model)
    file = largest_weight_file(path)
    if refresh:
        forget_curves()
    with waiting("measuring this machine"):
        result = measure_storage(file, refresh=refresh)
        gpu = ThisGpu(path, model_formats(path)) if device == CUDA else None
        machine = gpu or ThisMachine(path, model_formats(path))
        _ = machine.dram_bytes_per_second, None if gpu is None else gpu.pcie_bytes_per_second
    if json:
        metrics = {
            "dram_bytes_per_second": machine.dram_bytes_per_second,
            "flops_per_second": machine.flops_per_second,
            "memory_bytes": machine.memory_bytes,
            **({} if gpu is None else _gpu_metrics(gpu)),
        }
        write_json({**asdict(result), **metrics})
        return
    when = datetime.fromtimestamp(result.measured_at).isoformat(" ", timespec="seconds")
    how = "O_DIRECT" if result.direct else "through the page cache"
    cached = "and cached on disk; --refresh measures again"
    if not is_in_disk_cache(result):
        cached = f"and not cached, {why_not_cached(file)}: the next call measures again"
    speeds = machine.flops_per_second.items()
    flops = ", ".join(f"{speed / 1e9:.0f} GFLOP/s in {name}" for name, speed in speeds)
    write_text(
        f"storage    {result.storage_bytes_per_second / 1e9:.2f} GB/s, {how}, "
        f"{result.n_readers} readers of {format_bytes(result.read_bytes)}\n"
        f"           measured {when} {cached}\n"
        f"memory     {format_bytes(machine.memory_bytes)}, "
        f"{machine.dram_bytes_per_second / 1e9:.1f} GB/s in one-token products\n"
        f"arithmetic {flops}\n"
    )
    if gpu is not None:
        write_text(
            f"GPU        {format_bytes(gpu.vram_bytes)}, copies from pinned memory "
            f"{gpu.pcie_bytes_per_second / 1e9:.2f} GB/s; the arithmetic above is the GPU's\n"
        )


def _gpu_metrics(gpu: ThisGpu) -> dict[str, float]:
    return {
        "vram_bytes": gpu.vram_bytes,
        "pcie_bytes_per_second": gpu.pcie_bytes_per_second,
    }


def demo(arguments: DemoArguments = None) -> None:
    """Compare plain and speculative decoding of a target of twice its memory budget."""
    run_benchmark("bench", ["demo", *(arguments or ())])
