"""Weights of the torch backend on a device with its own memory: resident, or copied in time.

The engine determines the device; nothing here is specific to CUDA.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from backends.contract.backend import TransferStats
from backends.feedforward.linear import linear_of_device
from backends.hf.model import HfModel
from backends.hf.weights import FetchExperts, RawTensors
from backends.packed.device import DeviceDecoder
from offload.device.engine import CopyEngine, DeviceBuffer
from offload.device.loading import load_on_device
from offload.device.streamer import DeviceStreamer
from offload.placement.placement import Placement
from offload.ring.slots import Check
from offload.storage.reading import DEFAULT_N_READERS
from offload.units import Progress


class TorchEngine(CopyEngine, Protocol):
    """A CopyEngine whose device torch computes on; parts of its buffers are uint8 tensors."""

    device: torch.device

    def computing(self) -> AbstractContextManager[None]:
        """See TorchWeights.computing; computations inside are enqueued in the engine's stream."""


class DeviceWeights:
    """Implement TorchWeights on a device.

    Args:
        plan: placement of the model's layers; embeddings, norm and head stay on the device.
    """

    fetch_experts: FetchExperts | None = None  # mixtures are computed on the CPU

    def __init__(
        self,
        model: HfModel,
        plan: Placement,
        engine: TorchEngine,
        *,
        n_readers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.device = engine.device
        self._plan, self._engine = plan, engine
        n_readers = n_readers or DEFAULT_N_READERS
        # Threads outside inference mode write to this memory, and a tensor created in inference
        # mode can only be changed in it.
        with torch.inference_mode(False):
            self._non_layer = load_on_device(model.non_layer_records, engine, n_readers=n_readers)
            try:
                self._streamer = DeviceStreamer(
                    plan, engine, n_readers=n_readers, progress=progress
                )
            except BaseException:
                self._non_layer.close()
                raise
            self._buffers: list[DeviceBuffer] = []
            try:
                self.decoder = DeviceDecoder(model.packed_modules, self._allocate, linear_of_device)
            except BaseException:
                self._streamer.close()
                self._non_layer.close()
                raise

    def _allocate(self, n_bytes: int) -> torch.Tensor:
        self._buffers.append(self._engine.allocate_device(n_bytes))
        part: torch.Tensor = self._buffers[-1].part(0, n_bytes)
        return part

    @property
    def non_layer(self) -> RawTensors:
        return self._non_layer

    def layer(self, index: int, check: Check | None = None) -> AbstractContextManager[RawTensors]:
        return self._streamer.layer(index, check)

    def stays(self, index: int) -> bool:
        return not self._plan.layers[index].copied_bytes

    @property
    def streams(self) -> bool:
        return any(layer.copied_bytes for layer in self._plan.layers)

    def computing(self) -> AbstractContextManager[None]:
        return self._engine.computing()

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        # Waiting for an event sleeps, which leaves the cores to readers and drafts.
        self._engine.record_compute().wait()
        self.decoder.check()
        # Copy to the host first: half the bytes, and no float32 copy in device memory.
        return logits.cpu().float().numpy()

    def restart(self) -> None:
        self._streamer.restart()

    @property
    def use(self) -> TransferStats:
        stats = self._streamer.stats
        return TransferStats(
            stats.bytes_read,
            stats.stall_seconds,
            stats.bytes_copied,
            stats.copy_stall_seconds,
            read_seconds=stats.read_seconds,
        )

    unread_bytes = 0
    pinned_bytes = 0

    def set_pinned_bytes(self, n_bytes: int) -> None:
        """Do nothing: the layers in host memory are fixed while the model is loaded."""

    def stop(self) -> bool:
        return self._streamer.stop()

    def close(self) -> None:
        self._streamer.close()  # waits for everything that is enqueued
        for buffer in self._buffers:
            buffer.close()
        self._non_layer.close()
