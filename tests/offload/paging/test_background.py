"""A mapped model's resident and non-layer pages are loaded before they are used."""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from pathlib import Path

import pytest
from mapped_weights import MappedWeights, mapped
from weight_files import write_weights

from offload.formats.tensors import TensorRecord
from offload.paging.pager import Pager
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import DirectFile, pread_into

N_LAYERS = 5
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def touches(record: TensorRecord, start: int, end: int) -> bool:
    return start < record.offset + record.n_bytes and record.offset < end


@pytest.mark.parametrize("non_layer", range(N_LAYERS))
@pytest.mark.parametrize("stays", [True, False])
def test_what_is_needed_is_there(tmp_path: Path, non_layer: int, stays: bool) -> None:
    """Non-layer tensors lie between any two layers and share pages with both. Tensors that stay
    mapped share pages with those that replace the mapping."""
    weights = write_weights(tmp_path, [[50_000, 3000]] * N_LAYERS, resident=lambda i, j: i > 1)
    layers = [layer for i, layer in enumerate(weights.layers) if i != non_layer]
    rest = weights.layers[non_layer].tensors
    needed = [*rest, *layers[0].tensors, *layers[1].tensors]
    opened = threading.Event()

    def read_at(descriptor: int, view: memoryview, offset: int) -> int:
        if not any(touches(record, offset, offset + len(view)) for record in needed):
            opened.wait()
        return pread_into(descriptor, view, offset)

    with mapped(weights) as files:
        resident, untouched = (rest, ()) if stays else ((), rest)
        with Pager(
            layers,
            resident,
            files.mappings,
            2,
            untouched=untouched,
            read_bytes=ALIGNMENT,
            n_readers=1,
            storage=partial(DirectFile, read_at=read_at),
        ) as pager:
            for index in range(2):
                pager.enter(index)
                for record in (*rest, *layers[index].tensors):
                    check(files, record)
                pager.leave(index)
            assert pager.unread_bytes > 0
            opened.set()
            for index in (2, 3, 0, 1, 2, 3):
                pager.enter(index)
                for record in (*rest, *layers[index].tensors):
                    check(files, record)
                pager.leave(index)
            assert pager.unread_bytes == 0


def check(files: MappedWeights, record: TensorRecord) -> None:
    actual = ctypes.string_at(files.address(record), record.n_bytes)
    assert actual == files.weights.contents[record.name], f"wrong bytes in {record.name}"
