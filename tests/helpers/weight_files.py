"""Files of known bytes, layers made of them, and storage that fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.ring.streamer import WeightStreamer
from offload.storage.direct_io import DirectFile, OpenStorage, pread_into


@dataclass(frozen=True)
class Weights:
    """Layers and the contents of their tensors."""

    layers: tuple[LayerWeights, ...]
    contents: dict[str, bytes]

    def check(self, index: int, tensors) -> None:
        """Assert that `tensors` are exactly those of layer `index`."""
        assert list(tensors) == [record.name for record in self.layers[index].tensors]
        for name, view in tensors.items():
            assert bytes(view) == self.contents[name], f"stale or wrong bytes in {name}"

    def run_passes(
        self, streamer: WeightStreamer, n_passes: int = 1, stop_before: int = -1
    ) -> None:
        """Check all layers of some passes; leave the last pass before layer `stop_before`."""
        for number in range(n_passes):
            for index in range(len(self.layers)):
                if index == stop_before and number == n_passes - 1:
                    return
                with streamer.layer(index) as tensors:
                    self.check(index, tensors)


def write_weights(
    folder: Path,
    sizes: Sequence[Sequence[int]],
    *,
    n_files: int = 1,
    padding: int = 100,
    resident: Callable[[int, int], bool] = lambda layer, tensor: False,
    seed: int = 0,
) -> Weights:
    """Write layers with tensors of `sizes[layer][tensor]` bytes, distributed over `n_files` files.

    Args:
        padding: bytes before the first tensor of each file, as a header would take.
        resident: whether a tensor (layer, position) is to be resident.
    """
    rng = np.random.default_rng(seed)
    paths = [folder / f"shard-{number}.bin" for number in range(n_files)]
    data = [bytearray(rng.bytes(padding)) for _ in paths]
    contents: dict[str, bytes] = {}
    layers = []
    n_dealt = 0
    for i, layer_sizes in enumerate(sizes):
        records = []
        for j, size in enumerate(layer_sizes):
            file = n_dealt % n_files
            n_dealt += 1
            name = f"layers.{i}.t{j}"
            contents[name] = rng.bytes(size)
            records.append(TensorRecord(name, "U8", (size,), paths[file], len(data[file]), size))
            data[file] += contents[name]
        names = frozenset(r.name for j, r in enumerate(records) if resident(i, j))
        layers.append(LayerWeights(tuple(records), names))
    for path, content in zip(paths, data, strict=True):
        path.write_bytes(content)
    return Weights(tuple(layers), contents)


class HangingFile(DirectFile):
    """A file whose reads hang until they are released."""

    let_go = threading.Event()

    def read_into(self, view: memoryview, offset: int) -> int:
        self.let_go.wait()
        return super().read_into(view, offset)


class FaultyReads:
    """A `read_at` that counts its calls and lets `fault(call number, length)` interfere.

    `fault` may raise, or return how many bytes to read at most (None: all).
    """

    def __init__(self, fault: Callable[[int, int], int | None] = lambda call, length: None) -> None:
        self.fault = fault
        self.n_calls = 0
        self._lock = threading.Lock()

    def __call__(self, descriptor: int, view: memoryview, offset: int) -> int:
        with self._lock:
            call = self.n_calls
            self.n_calls += 1
        limit = self.fault(call, len(view))
        n_read = pread_into(descriptor, view, offset)
        if limit is None or n_read <= limit:
            return n_read
        # Bytes that a short read did not deliver must not be in the buffer either.
        view[limit:n_read] = b"\xee" * (n_read - limit)
        return limit

    @property
    def storage(self) -> OpenStorage:
        """Open a file for the streamer's `storage` argument."""
        return partial(DirectFile, read_at=self)
