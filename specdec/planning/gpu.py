"""The GPU of a run: whether one is used, the VRAM that the run may take, and its speed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from backends.contract.backend import UnsupportedModel
from backends.contract.source import ModelSource
from backends.timing.measure import matrix_formats
from offload.ring.bandwidth import measure_storage
from offload.units import format_bytes, format_down
from specdec.checks import ConfigError, FieldName
from specdec.models.opened import OpenedPair, Sources
from specdec.planning.candidate_cost import measure_draft
from specdec.planning.measurements import Measurements
from specdec.planning.memory.base import asked_budget
from specdec.planning.memory.memory_plan import Gpu
from specdec.run_options import AUTO, CPU, CUDA, RunOptions

if TYPE_CHECKING:
    from backends.hf.source import HfSource

_SLOW_BF16 = (
    "{name} has no arithmetic for bf16 and takes float32 for it, which is slow: a checkpoint in "
    "float16 runs several times faster"
)

_USE_CPU = "use --device cpu"


def find_gpu(options: RunOptions, pair: Sources) -> Gpu | None:
    """Return this machine's GPU for the run; None for a run on the CPU.

    Raises NoDevice, UnsupportedModel and ConfigError where a GPU was requested and cannot be used.
    """
    target = pair.sources[0]
    if not _uses_gpu(options, target):
        check_no_gpu_options(options)
        return None
    from backends.cuda.probe import cuda_memory

    memory = cuda_memory()
    limit = memory.free_bytes + memory.used_bytes  # the budget is the whole process's
    vram_bytes, source = limit, f"what is free on {memory.name}"
    if options.vram_budget != AUTO:
        whose = (
            f"what is free on {memory.name}, {format_down(limit)} of "
            f"{format_bytes(memory.total_bytes)}"
        )
        vram_bytes, source = asked_budget("VRAM", options.vram_budget, limit, whose), "as asked"
    gpu = gpu_for(options, pair, vram_bytes, source)
    slow = not memory.computes_bf16 and "BF16" in matrix_formats(target.multiplied)
    warnings = (_SLOW_BF16.format(name=memory.name),) if slow else ()
    return replace(gpu, used_bytes=memory.used_bytes, warnings=warnings)


def gpu_for(
    options: RunOptions,
    pair: Sources,
    vram_bytes: int,
    source: str,
    host_bytes: int = 0,
    remedy: str = "",
) -> Gpu:
    """Describe a GPU with `vram_bytes` of memory, present on this machine or not.

    Args:
        host_bytes: host memory that its libraries will take beyond what this process takes already.
        remedy: for a model that does not run on a GPU, where another device than `options` say is
            planned for.

    Raises UnsupportedModel for a model that does not run on a GPU.
    """
    target, draft = pair.sources
    if draft is not None and draft.hidden_state_bytes:
        raise UnsupportedModel(
            f"{draft.path} is a draft head, which runs beside a target on the CPU only: use "
            "--device cpu, or name a draft model"
        )
    gpu_draft, device = None, options.draft_device
    if draft is not None and (device == CUDA or (device == AUTO and draft.can_use_gpu)):
        gpu_draft = on_gpu(draft, remedy or "leave --draft-device out")
    cpu_draft = None if device == CUDA else draft
    gpu_target = on_gpu(target, remedy or _USE_CPU)
    return Gpu(vram_bytes, source, gpu_target, cpu_draft, gpu_draft, host_bytes)


def on_gpu(source: ModelSource, remedy: str = _USE_CPU) -> ModelSource:
    """Return the model as a CUDA device would run it: with its activations and arithmetic, and a
    `load` that takes a placement on it. No device is needed before it measures.

    Raises UnsupportedModel for a format that runs on the CPU only.
    """
    if not source.can_use_gpu:
        raise UnsupportedModel(
            f"{source.path} runs on the CPU only, as GGUF files, mixtures of experts and recurrent "
            f"models do: {remedy}"
        )
    from backends.cuda.source import HfGpuSource

    return HfGpuSource(cast("HfSource", source))  # the one format that can


def measure_with_gpu(pair: Sources, gpu: Gpu) -> Measurements:
    """Measure the storage, the GPU's arithmetic, copies to it, and drafting on either device."""
    from backends.cuda import probe as cuda_probe

    storage = measure_storage(pair.sources[0].weight_file).storage_bytes_per_second
    cpu_draft = None if gpu.cpu_draft is None else measure_draft(gpu.cpu_draft)
    with cuda_probe.measuring():
        return Measurements(
            storage,
            gpu.target.measure_compute(beside_reads=False),
            cpu_draft,
            None if gpu.draft is None else measure_draft(gpu.draft),
            cuda_probe.measure_copies_to_gpu(),
        )


def placement(pair: OpenedPair, gpu: Gpu | None, draft_device: str) -> OpenedPair:
    """Return the models with the sources (CPU or GPU) that they are to be loaded from."""
    if gpu is None:
        return pair
    draft = pair.draft
    if draft is not None and gpu.draft is not None and draft_device == CUDA:
        draft = replace(draft, source=gpu.draft)
    return OpenedPair(replace(pair.target, source=gpu.target), draft)


def vram_peak_bytes() -> int:
    """Return the peak of VRAM that torch's allocator has reserved in this process."""
    from backends.cuda import engine as cuda_engine

    return cuda_engine.vram_peak_bytes()


def check_no_gpu_options(options: RunOptions) -> None:
    """Raise ConfigError for options that make sense with a GPU only."""
    if options.draft_device == CUDA:
        raise ConfigError(
            FieldName("draft_device"),
            " is 'cuda', but the target is computed on the CPU (",
            FieldName("device"),
            f" is {options.device}): a GPU drafts beside a target that uses it too: give --device "
            "cuda and a checkpoint, or leave --draft-device out",
        )
    if options.vram_budget != AUTO:
        raise ConfigError(
            FieldName("vram_budget"),
            f" is {options.vram_budget}, but the target is computed on the CPU (",
            FieldName("device"),
            f" is {options.device}): give --device cuda and a checkpoint, or leave --vram-budget "
            "out",
        )


def _uses_gpu(options: RunOptions, target: ModelSource) -> bool:
    """Return whether the target runs on a GPU. torch is imported only for models that it runs."""
    if options.device == CPU:
        return False
    if not target.can_use_gpu:
        if options.device == CUDA:
            on_gpu(target)  # says why not
        return False
    from backends.cuda import engine as cuda_engine

    problem = cuda_engine.cuda_problem()
    if problem is not None and options.device == CUDA:
        raise cuda_engine.NoDevice(f"device 'cuda' cannot be used: {problem}")
    return problem is None
