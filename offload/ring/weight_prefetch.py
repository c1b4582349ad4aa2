"""A model's weights on their way into memory before the plan is known, which is likely to ask for
them: the libraries that compute with them take seconds to be imported.

What is read is what the plan of an earlier start asked for. Where today's asks for something else,
it is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from offload.formats.tensors import CheckpointError, TensorRecord
from offload.placement.placement import LayerWeights
from offload.ring.streamer import WeightStreamer, load_resident
from offload.storage.direct_io import DirectFile, OpenStorage, StorageError
from offload.storage.pausable import PausableReads
from offload.storage.reading import DEFAULT_N_READERS, ResidentWeights
from offload.units import Progress


@dataclass(frozen=True)
class RequestedWeights:
    """What a model that the CPU computes has in memory, and how the rest is streamed."""

    non_layer: tuple[TensorRecord, ...]
    """Outside of the layers."""
    layers: tuple[LayerWeights, ...]
    n_slots: int
    n_readers: int | None = None


@dataclass
class Weights:
    """Weights that stay, and layers that may stream; to be closed."""

    non_layer: ResidentWeights
    layers: WeightStreamer

    def close(self) -> None:
        self.layers.close()
        self.non_layer.close()


def open_weights(
    requested: RequestedWeights, progress: Progress | None = None, storage: OpenStorage = DirectFile
) -> Weights:
    """Read what is needed at once, and begin to read the rest. Raises StorageError, MemoryError."""
    n_readers = requested.n_readers or DEFAULT_N_READERS
    non_layer = load_resident(requested.non_layer, n_readers=n_readers, storage=storage)
    try:
        layers = WeightStreamer(
            requested.layers,
            requested.n_slots,
            n_readers=n_readers,
            storage=storage,
            progress=progress,
        )
    except BaseException:
        non_layer.close()
        raise
    return Weights(non_layer, layers)


class WeightPrefetch:
    """`open_weights` in a thread.

    Args:
        check_unchanged: raises CheckpointError where the files are not those that `wanted` is of.
    """

    def __init__(
        self,
        requested: RequestedWeights,
        check_unchanged: Callable[[], None],
        progress: Progress | None = None,
    ) -> None:
        self._requested, self._check_unchanged = requested, check_unchanged
        self._reads = PausableReads()
        pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-early")
        self._opening: Future[Weights] | None = pool.submit(
            open_weights, requested, progress, self._reads.open
        )
        pool.shutdown(wait=False)

    @contextmanager
    def paused(self) -> Iterator[int]:
        """Nothing is read; yields how many bytes of memory this has taken, 0 after `close`."""
        with self._reads.paused() as n_bytes:
            yield 0 if self._opening is None else n_bytes

    def take(self, requested: RequestedWeights) -> Weights | None:
        """What has been read, for the caller to close; None, and it is given back, where that is
        not what is wanted, or could not be read."""
        if self._opening is None or requested != self._requested:
            self.close()
            return None
        try:
            self._check_unchanged()
            weights = self._opening.result()
        except (CheckpointError, StorageError, MemoryError):
            self.close()
            return None
        self._opening = None
        return weights

    def close(self) -> None:
        """Give back what was not taken. Idempotent."""
        opening, self._opening = self._opening, None
        if opening is not None and opening.exception() is None:
            opening.result().close()
