"""A GGUF model that llama.cpp maps without reading it.

llama.cpp makes the kernel read all of a file that it maps (MAP_POPULATE), a useless read of a model
that is paged. So it is given stand-ins: files in memory, as long as the model's, with their headers
and no data. MAP_POPULATE cannot read past the end of a file, so they are truncated to the header at
the right moment, and replaced by the model's files at the end:

    llama.cpp opens the files, compares their lengths with the header, and logs "loaded meta data"
                                                    the stand-ins are truncated
    ... maps them, reading up to their end
    ... gives the weights their addresses, and reads none of them
                                                    the model's files are mapped there
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from backends.ggml.library import LOG, LlamaError, LlamaModel
from backends.gguf.model import GgufModel
from offload.formats.gguf_header import GgufFile
from offload.paging.address_space import AddressSpaceError, find_mapping, map_over

logger = logging.getLogger(__name__)

_OPENED = "loaded meta data"
_COPY_BYTES = 1 << 20


def map_unread(model: GgufModel, *, has_head: bool = False) -> LlamaModel:
    """Load a model with its files mapped, but not read. If that fails, log it and read them.
    Raises LlamaError.

    has_head: whether to load its MTP head, too.
    """
    try:
        with _stand_ins(model.index.files) as stand_ins:
            return _load(model, stand_ins, has_head)
    except (LlamaError, AddressSpaceError, OSError) as error:
        # Raises LlamaError if the model itself is refused.
        loaded = LlamaModel(model.path, "mmap", has_head=has_head)
        logger.warning("llama.cpp reads all of %s once as it maps it: %s", model.path, error)
        return loaded


def _load(model: GgufModel, stand_ins: Sequence[_StandIn], has_head: bool) -> LlamaModel:
    def cut(line: str) -> None:
        if _OPENED in line:
            for stand_in in stand_ins:
                stand_in.cut()

    with LOG.heard_by(cut):
        paths = [stand_in.path for stand_in in stand_ins]
        loaded = LlamaModel(model.path, "mmap", stand_ins=paths, has_head=has_head)
    try:
        for stand_in in stand_ins:
            stand_in.replace()
    except BaseException:
        loaded.close()
        raise
    return loaded


@contextmanager
def _stand_ins(files: Sequence[GgufFile]) -> Iterator[list[_StandIn]]:
    made: list[_StandIn] = []
    try:
        for file in files:
            made.append(_StandIn(file))
            made[-1].fill()
        yield made
    finally:
        for stand_in in made:
            stand_in.close()


class _StandIn:
    """A file in memory with one model file's header and length. Raises OSError."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._descriptor = os.memfd_create("specdec-header")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._descriptor}")
        self._is_cut = False

    def fill(self) -> None:
        n_missing = self._file.data_offset
        with self._file.path.open("rb") as source:
            while n_missing and (part := source.read(min(n_missing, _COPY_BYTES))):
                n_missing -= os.write(self._descriptor, part)
        os.ftruncate(self._descriptor, self._file.state.n_bytes)

    def cut(self) -> None:
        os.ftruncate(self._descriptor, self._file.data_offset)
        self._is_cut = True

    def replace(self) -> None:
        """Map the file wherever the stand-in is mapped."""
        if not self._is_cut:
            raise LlamaError(f"this llama.cpp does not log {_OPENED!r}")
        for mapped in find_mapping(self.path):
            map_over(self._file.path, mapped)

    def close(self) -> None:
        os.close(self._descriptor)
