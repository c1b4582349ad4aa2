"""Weight prefetch: reading a model's weights before the plan is known, while the libraries that
compute with them are imported, which takes seconds.

The weights read are those that the plan of an earlier start asked for. If today's plan differs,
they are freed.
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
class WeightSelection:
    """The weights that a CPU model has in memory, and how the others are streamed."""

    non_layer: tuple[TensorRecord, ...]
    """Non-layer tensors."""
    layers: tuple[LayerWeights, ...]
    n_slots: int
    n_readers: int | None = None


@dataclass
class Weights:
    """Resident weights, and layers that may stream; to be closed."""

    non_layer: ResidentWeights
    layers: WeightStreamer

    def close(self) -> None:
        self.layers.close()
        self.non_layer.close()


def open_weights(
    selection: WeightSelection, progress: Progress | None = None, storage: OpenStorage = DirectFile
) -> Weights:
    """Read the non-layer weights, begin to read the layers. Raises StorageError, MemoryError."""
    n_readers = selection.n_readers or DEFAULT_N_READERS
    non_layer = load_resident(selection.non_layer, n_readers=n_readers, storage=storage)
    try:
        layers = WeightStreamer(
            selection.layers,
            selection.n_slots,
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
        check_unchanged: raises CheckpointError if the files are not those of `selection`.
    """

    def __init__(
        self,
        selection: WeightSelection,
        check_unchanged: Callable[[], None],
        progress: Progress | None = None,
    ) -> None:
        self._selection, self._check_unchanged = selection, check_unchanged
        self._reads = PausableReads()
        pool = ThreadPoolExecutor(1, thread_name_prefix="specdec-prefetch")
        self._opening: Future[Weights] | None = pool.submit(
            open_weights, selection, progress, self._reads.open
        )
        pool.shutdown(wait=False)

    @contextmanager
    def paused(self) -> Iterator[int]:
        """Pause all reads; yield how many bytes of memory this has taken, 0 after `close`."""
        with self._reads.paused() as n_bytes:
            yield 0 if self._opening is None else n_bytes

    def take(self, selection: WeightSelection) -> Weights | None:
        """Return the weights read, for the caller to close. Return None and free them if they are
        not the selected ones, or could not be read."""
        if self._opening is None or selection != self._selection:
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
        """Free weights that were not taken. Idempotent."""
        opening, self._opening = self._opening, None
        if opening is not None and opening.exception() is None:
            opening.result().close()
