"""Safetensors files whose tensors are written and read in place, through mappings.

Nothing is in memory twice: tensors are written to the file's pages and read from there, each mapped
only while it is used. A file is written under a temporary name and renamed when it is complete and
on the disk, so that no process sees a partial one, and it is checked against its own digest before
it is used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from offload.formats.lease import FileInUse, read_lease
from offload.formats.safetensors import DTYPE_BITS, read_header_and_metadata
from offload.formats.tensors import CheckpointError, FileState, TensorRecord, file_state
from offload.units import MIB

_ALIGNMENT = 64
_CHUNK_BYTES = MIB
_DIGEST_KEY = "sha256"
_NO_DIGEST = "0" * 64
_T = TypeVar("_T")


class FileChanged(CheckpointError):
    """A file was written, or used, by another process while it was read."""


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a file to be written."""

    name: str
    dtype: str  # safetensors' name: "BF16", "U8", ...
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        n_bits = DTYPE_BITS[self.dtype]
        for size in self.shape:
            n_bits *= size
        return n_bits // 8


class LazyMapping(Mapping[str, _T]):
    """Values that are made when they are accessed, and not cached."""

    def __init__(self, names: Mapping[str, object], make: Callable[[str], _T]) -> None:
        self._names, self._make = names, make

    def __getitem__(self, name: str) -> _T:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True)
class MappedFile:
    """A file that was read: its metadata, and its tensors in place."""

    metadata: Mapping[str, str]
    records: Mapping[str, TensorRecord]
    buffers: Mapping[str, memoryview]
    """Bytes of each tensor, mapped at every access, as long as this object is there. Changes to
    them stay in this process."""
    _file: BinaryIO
    _state: FileState

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Keep the file from being truncated, which would end a process that reads it: writers
        wait. Use `buffers` only inside this context.

        Raises FileChanged if the file was changed since it was checked, CheckpointError if it is
        being written.
        """
        try:
            with read_lease(self._file.fileno()):
                self.check_unchanged()
                yield
        except FileInUse as error:
            raise CheckpointError(f"{self._file.name}: {error.strerror}") from error

    def check_unchanged(self) -> None:
        """Raise FileChanged if the file was overwritten or truncated since it was checked."""
        if FileState.of(os.fstat(self._file.fileno())) != self._state:
            raise FileChanged(f"{self._file.name} was changed since it was read")

    def forget_pages(self) -> None:
        """Drop the file's pages from the page cache, which counts in a memory cgroup, too."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def __del__(self) -> None:
        self._file.close()


def file_bytes(tensors: Sequence[TensorShape], metadata: Mapping[str, str]) -> int:
    """Return the size of the file that `write_mapped` writes."""
    n_header = len(_header(_in_order(tensors), metadata, _NO_DIGEST))
    return n_header + sum(tensor.n_bytes for tensor in tensors)


def write_mapped(
    path: Path,
    tensors: Sequence[TensorShape],
    metadata: Mapping[str, str],
    fill: Callable[[Mapping[str, memoryview]], None],
) -> None:
    """Let `fill` write every tensor's bytes; then replace `path` by the file.

    Raises:
        OSError: no space, no permission.
        Any exception of `fill`. `path` is unchanged then.
    """
    place = Path(os.path.realpath(path))  # a link stays a link
    tensors = _in_order(tensors)
    header = _header(tensors, metadata, _NO_DIGEST)
    n_bytes = len(header) + sum(tensor.n_bytes for tensor in tensors)
    descriptor, aside = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        try:
            os.posix_fallocate(descriptor, 0, n_bytes)  # a full disk would raise SIGBUS later
            fill(_buffers(descriptor, len(header), tensors))
            with os.fdopen(os.dup(descriptor), "r+b", buffering=0) as file:
                digest = _digest(file, len(header))
                file.seek(0)
                file.write(_header(tensors, metadata, digest))
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(aside, place)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    _sync_folder(place.parent)


def read_mapped(path: Path) -> MappedFile:
    """Map a file that `write_mapped` has written.

    Raises:
        CheckpointError: it was not written so, or is damaged.
    """
    state = file_state(path)
    metadata, records = read_header_and_metadata(path)
    if _DIGEST_KEY not in metadata:
        raise CheckpointError(f"{path} was written by another program")
    try:
        file = path.open("rb", buffering=0)
        try:
            return _checked(file, state, metadata, records)
        except BaseException:
            file.close()
            raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _checked(
    file: BinaryIO,
    state: FileState,
    metadata: Mapping[str, str],
    records: Mapping[str, TensorRecord],
) -> MappedFile:
    start = min((record.offset for record in records.values()), default=state.n_bytes)
    digest = _digest(file, start)  # read, not mapped: a truncated file just ends early
    if digest != metadata[_DIGEST_KEY]:
        raise CheckpointError(f"{file.name} is damaged: its content does not match its checksum")
    buffers = LazyMapping(
        records,
        lambda name: _mapped(
            file.fileno(), records[name].offset, records[name].n_bytes, mmap.ACCESS_COPY
        ),
    )
    mapped = MappedFile(metadata, records, buffers, file, state)
    mapped.check_unchanged()
    return mapped


def _digest(file: BinaryIO, start: int) -> str:
    digest = hashlib.sha256()
    file.seek(start)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _in_order(tensors: Sequence[TensorShape]) -> list[TensorShape]:
    """Return the widest dtypes first, so that each tensor is aligned to its dtype."""
    return sorted(tensors, key=lambda tensor: -DTYPE_BITS[tensor.dtype])


def _header(tensors: Sequence[TensorShape], metadata: Mapping[str, str], digest: str) -> bytes:
    """Return length, JSON and padding for aligned data; the size is the same for any digest."""
    table: dict[str, object] = {"__metadata__": {**metadata, _DIGEST_KEY: digest}}
    position = 0
    for tensor in tensors:
        end = position + tensor.n_bytes
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _buffers(
    descriptor: int, position: int, tensors: Sequence[TensorShape]
) -> Mapping[str, memoryview]:
    """Return the bytes of each tensor, mapped at every access, from `position` on."""
    places = {}
    for tensor in tensors:
        places[tensor.name] = (position, tensor.n_bytes)
        position += tensor.n_bytes
    return LazyMapping(places, lambda name: _mapped(descriptor, *places[name], mmap.ACCESS_WRITE))


def _mapped(descriptor: int, offset: int, n_bytes: int, access: int) -> memoryview:
    """Map bytes of a file; they are unmapped when the last reference to them is gone."""
    if not n_bytes:
        return memoryview(bytearray())
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(descriptor, offset + n_bytes - start, access=access, offset=start)
    return memoryview(pages)[offset - start :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
