"""This machine with its GPU: what `specdec profile --device cuda` measures for `--on`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from backends.contract.curve import ComputeCurve
from specdec.devices.spec import DeviceError
from specdec.devices.this_machine import ThisMachine, torch_format
from specdec.models.opened import is_gguf


class ThisGpu(ThisMachine):
    """Storage and memory of this machine, arithmetic of its GPU.

    Raises NoDevice where there is none, DeviceError for a GGUF model.
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
        from backends.hf.timing import measure_gpu_compute

        dtype = torch_format(name)
        with cuda_probe.measuring():
            return measure_gpu_compute(dtype, torch.device("cuda", 0)), dtype.itemsize
