"""Measurements of this machine for one model: storage, arithmetic in its formats, memory.

Each is measured at its first access, with the code that runs the model: ggml for GGUF files, torch
for checkpoints, on the CPU or a GPU. Neither reads weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from backends.contract.curve import ComputeCurve
from backends.shapes.shape import STATE_FORMAT
from backends.timing.measure import matrix_formats
from offload.process.memory import memory_limit
from offload.ring.bandwidth import measure_storage
from specdec.devices.spec import DeviceError
from specdec.models.opened import is_gguf
from specdec.models.weight_files import largest_weight_file


class ThisMachine:
    """The `Machine` of this computer, measured for one model.

    Args:
        model: directory or GGUF file of the model, as `resolve_model` returns it.
        formats: number formats to time, by the names that weight files use.
        n_threads: threads for arithmetic; a run's default when None.
    """

    def __init__(self, model: Path, formats: Iterable[str], n_threads: int | None = None) -> None:
        self._model = model
        self._formats = tuple(dict.fromkeys(formats))
        self._n_threads = n_threads

    @cached_property
    def storage_bytes_per_second(self) -> float:
        if self._model.is_dir() and not any(self._model.glob("*.safetensors")):
            raise DeviceError(
                f"{self._model} has no weights to measure the storage with: name a storage or a "
                "device by --on"
            )
        return measure_storage(largest_weight_file(self._model)).storage_bytes_per_second

    @cached_property
    def memory_bytes(self) -> int:
        return memory_limit().n_bytes

    @cached_property
    def _profiles(self) -> dict[str, tuple[ComputeCurve, float]]:
        """Measurements by number format."""
        return {name: self.measure(name) for name in self._formats}

    def measure(self, name: str) -> tuple[ComputeCurve, float]:
        """Return (seconds per byte of weights, bytes of one weight) of a number format."""
        measure = _measure_ggml if is_gguf(self._model) else _measure_torch
        return measure(name, self._n_threads)

    @cached_property
    def flops_per_second(self) -> Mapping[str, float]:
        return {
            name: 2 / (weight_bytes * profile.seconds_per_token)
            for name, (profile, weight_bytes) in self._profiles.items()
        }

    @cached_property
    def dram_bytes_per_second(self) -> float:
        """Weight bytes per second of a product with one token; the best of the formats, because
        those of few bits are bound by unpacking and not by memory."""
        return max(1 / profile.seconds(1) for profile, _ in self._profiles.values())


class ThisGpu(ThisMachine):
    """Storage and memory of this machine, arithmetic of its GPU: `specdec profile --device cuda`.

    Raises NoDevice where there is no GPU, DeviceError for a GGUF model.
    """

    def __init__(self, model: Path, formats: Iterable[str]) -> None:
        super().__init__(model, formats)
        if is_gguf(model):
            raise DeviceError(f"{model} runs on the CPU only: profile a GPU with a checkpoint")
        from backends.cuda import engine as cuda_engine

        problem = cuda_engine.cuda_problem()
        if problem is not None:
            raise cuda_engine.NoDevice(f"device 'cuda' cannot be used: {problem}")

    @cached_property
    def vram_bytes(self) -> int:
        from backends.cuda.probe import cuda_memory

        return cuda_memory().total_bytes

    @cached_property
    def pcie_bytes_per_second(self) -> float:
        from backends.cuda import probe as cuda_probe

        with cuda_probe.measuring():
            return cuda_probe.measure_copies_to_gpu()

    def measure(self, name: str) -> tuple[ComputeCurve, float]:
        import torch

        from backends.cuda import probe as cuda_probe
        from backends.feedforward.timing import measure_gpu_compute

        dtype = _torch_format(name)
        with cuda_probe.measuring():
            return measure_gpu_compute(dtype, torch.device("cuda", 0)), dtype.itemsize


_COMPUTED = ("BF16", "F16", "F32")


def model_formats(model: Path) -> tuple[str, ...]:
    """Return the number formats of a run's arithmetic; read the headers of the files."""
    if is_gguf(model):
        from offload.formats.gguf_index import GgufIndex

        formats = matrix_formats(GgufIndex.from_path(model).values())
        return tuple(dict.fromkeys((*formats, "F16", STATE_FORMAT)))  # the KV cache is F16
    from offload.formats.checkpoint import WeightIndex

    records = WeightIndex.from_directory(model).values()
    formats = matrix_formats(r for r in records if r.dtype in _COMPUTED)  # others become these
    return tuple(dict.fromkeys((*formats, STATE_FORMAT)))


def _measure_ggml(name: str, n_threads: int | None) -> tuple[ComputeCurve, float]:
    from backends.ggml.timing import measure_ggml_compute
    from offload.formats.gguf_header import GGML_TYPES
    from offload.process.cpus import usable_cpus

    for number, kind in GGML_TYPES.items():
        if kind.name == name:
            profile = measure_ggml_compute(number, n_threads or usable_cpus())
            return profile, kind.block_bytes / kind.block_size
    raise DeviceError(f"{name} is no number format of ggml: arithmetic cannot be timed")


def _torch_format(name: str) -> Any:
    """Return the torch dtype of a weight-file format. Raises DeviceError where there is none."""
    from backends.checkpoint.records import TORCH_DTYPES

    if name not in TORCH_DTYPES:
        raise DeviceError(
            f"arithmetic in {name} cannot be timed here, only in {', '.join(TORCH_DTYPES)}: "
            "name a device with all its values by --on"
        )
    return TORCH_DTYPES[name]


def _measure_torch(name: str, n_threads: int | None) -> tuple[ComputeCurve, float]:
    from backends.feedforward.timing import measure_compute
    from backends.hf.threads import keep_few_kernels, use_threads

    dtype = _torch_format(name)
    keep_few_kernels()
    use_threads(n_threads)
    return measure_compute(dtype), dtype.itemsize
