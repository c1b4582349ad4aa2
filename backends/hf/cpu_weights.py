"""Weights of the torch backend on the CPU: in memory, or streamed from storage through a ring.

Both contain the bytes of the file; packed tensors are decoded when their module runs.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch

from backends.contract.backend import TransferStats
from backends.hf.model import HfModel
from backends.hf.row_tables import RowTable, resident_records, tables_of
from backends.hf.weights import FetchExperts, RawTensors
from backends.packed.decoder import Decoder
from offload.experts.cache import ExpertCache
from offload.experts.cached import keep_decay
from offload.experts.readers import ExpertStats
from offload.placement.experts import ExpertCachePlan, count_experts
from offload.placement.placement import LayerWeights
from offload.ring.slots import Check
from offload.ring.streamer import WeightStreamer, load_resident
from offload.storage.reading import DEFAULT_N_READERS
from offload.units import Progress


class CpuWeights:
    """Implement TorchWeights on the CPU. Tensors are views of the memory that files were read into.

    Args:
        layers: placement of the layers: which tensors stay in memory.
        n_slots: depth of the ring for the others.
        experts: slots of the expert cache; None: one for each expert.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        model: HfModel,
        layers: Sequence[LayerWeights],
        n_slots: int,
        *,
        n_readers: int | None = None,
        progress: Progress | None = None,
        experts: ExpertCachePlan | None = None,
    ) -> None:
        self._layers = tuple(layers)
        ring_readers = n_readers or DEFAULT_N_READERS
        self._expert_plan = experts or ExpertCachePlan(model.experts, count_experts(model.experts))
        self._experts: ExpertCache | None = None
        self.fetch_experts: FetchExperts | None = None
        with ExitStack() as stack:  # closed if a later part fails
            tables = [RowTable(bound, model.dtype) for bound in tables_of(model)]
            for table in tables:
                stack.callback(table.detach)
            self._non_layer = load_resident(resident_records(model), n_readers=ring_readers)
            stack.callback(self._non_layer.close)
            self._streamer = WeightStreamer(
                self._layers, n_slots, n_readers=ring_readers, progress=progress
            )
            stack.callback(self._streamer.close)
            self.decoder = Decoder(model.packed_modules, torch.get_num_threads())
            stack.callback(self.decoder.close)  # its threads read the weights
            if model.experts:
                self._experts = ExpertCache(self._expert_plan, n_readers=n_readers)
                self.fetch_experts = partial(_fetch, self._experts)
            self._closing = stack.pop_all()

    @property
    def non_layer(self) -> RawTensors:
        return _Tensors(self._non_layer)

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[RawTensors]:
        with self._streamer.layer(index, check) as tensors:
            yield _Tensors(tensors)

    def stays(self, index: int) -> bool:
        return not self._layers[index].layout.extents

    @property
    def streams(self) -> bool:
        return any(layer.layout.extents for layer in self._layers)

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        return logits.float().numpy()

    def restart(self) -> None:
        self._streamer.restart()

    @property
    def use(self) -> TransferStats:
        experts = ExpertStats() if self._experts is None else self._experts.stats
        return TransferStats.of(self._streamer.stats, experts)

    @property
    def unread_bytes(self) -> int:
        return self._streamer.unread_bytes

    @property
    def pinned_bytes(self) -> int:
        return self._streamer.pinned_bytes

    def set_pinned_bytes(self, n_bytes: int) -> None:
        self._streamer.set_pinned_bytes(n_bytes)

    def stop(self) -> bool:
        if self._experts is not None:
            self._experts.stop()
        return self._streamer.stop()

    def close(self) -> None:
        if self._experts is not None:
            self._experts.close()
            keep_decay(self._expert_plan, self._experts.stats)
        self._closing.close()


def _fetch(
    cache: ExpertCache, layer: int, experts: Sequence[int], check: Check | None
) -> Generator[tuple[int, tuple[torch.Tensor, ...]], None, None]:
    with closing(cache.fetch(layer, experts, check)) as fetched:
        for expert, tensors in fetched:
            yield expert, tuple(torch.frombuffer(x, dtype=torch.uint8) for x in tensors)


class _Tensors(Mapping[str, torch.Tensor]):
    """Bytes as tensors, made when they are bound: a layer that stays is bound once, but entered in
    every pass."""

    def __init__(self, views: Mapping[str, memoryview]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.frombuffer(self._views[name], dtype=torch.uint8)

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
