"""The fake device with torch on it: copies are late or early, computations are done at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from fake_device import POISON, FakeBuffer, FakeDevice, FakeEvent, Policy

from backends.cuda.errors import VramUse, no_raw_out_of_memory


class TensorBuffer(FakeBuffer):
    """Device memory whose parts are CPU tensors."""

    def __init__(self, device: FakeDevice, n_bytes: int) -> None:
        super().__init__(device, n_bytes)
        self.memory = torch.full((n_bytes,), POISON, dtype=torch.uint8)

    def part(self, offset: int, n_bytes: int) -> torch.Tensor:
        assert not self.is_closed
        return self.memory[offset : offset + n_bytes]

    def write(self, offset: int, source: memoryview) -> None:
        super().write(offset, torch.frombuffer(source, dtype=torch.uint8))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._device.n_allocated -= self.n_bytes
            self.memory.fill_(POISON)


class CpuEngine(FakeDevice):
    """A TorchEngine. torch computes on the host without delay, so waits must block."""

    device = torch.device("cpu")
    vram_bytes = 10**9
    free_bytes = 10**10
    """Free memory of the card, as reported by its driver."""

    def __init__(self, copies: Policy = Policy.LATE, seed: int = 0, **options) -> None:
        super().__init__(copies, Policy.EARLY, seed, **options)

    def allocate_device(self, n_bytes: int) -> TensorBuffer:
        return TensorBuffer(self, n_bytes)

    def compute_waits(self, event: FakeEvent) -> None:
        super().compute_waits(event)
        event.wait()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with no_raw_out_of_memory(self._use):
            yield

    def _use(self) -> VramUse:
        return VramUse(self.n_allocated, self.vram_bytes, self.free_bytes)
