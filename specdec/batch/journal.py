"""The output file while it is made: nothing is lost by a kill, nothing is written twice.

Records are appended to OUT.partial as lines are answered, whatever their order. When the last one
is there, OUT is written from it, synced, renamed into place, and OUT.partial removed. So OUT is
always whole or not there at all. Holding records back until those before them are there, so that
OUT itself could grow in the order of the input, would lose finished work to a kill, and keep it in
memory behind one long text.

What a resumed batch reads:

- OUT.partial begins with the options that decide on the texts; others are refused by name. It
  counts up to its first line that is not whole: a kill may cut the last, a power failure more.
- Each record has the number and the digest of its line. An input that has grown is answered to its
  new end; one whose answered lines have changed is refused.
- OUT of a batch that ended is read the same way: the same command again has nothing left to do, or
  answers the lines that the input has grown by.

OUT.partial is locked while a process writes to it. It is synced to the disk once a second at most:
a sync takes milliseconds and an answer seconds, and what a power failure takes is computed again.
A killed process loses nothing that was written, synced or not.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from typing_extensions import Self

from specdec.batch.answered import AnsweredLines
from specdec.batch.lines import BatchError, LineKey
from specdec.batch.records import key_of

SYNC_SECONDS = 1.0
INPUT, FINISHED = "input", "finished"
ORDERS = (INPUT, FINISHED)
_HEADER = "specdec_batch"
_COPY_BYTES = 1 << 20


class Journal:
    """The records of one batch.

    Args:
        out: where they are at the end.
        options: that decide on the texts, as JSON has them.
        n_input_bytes: of the input, which has no more lines than that.

    Raises BatchError where the files belong to another batch, or to another process; OSError.
    """

    def __init__(self, out: Path, options: Mapping[str, Any], n_input_bytes: int) -> None:
        self.out = Path(os.path.realpath(out))
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._options = json.loads(json.dumps(options))
        self._answered = AnsweredLines(self.out, self.partial, n_input_bytes)
        self.is_finished = False
        _check_regular(self.out)
        _check_regular(self.partial)
        self._descriptor = _open_locked(self.partial)
        try:
            self._n_bytes = self._read_partial()
            self._read_out()
            os.ftruncate(self._descriptor, self._n_bytes)
            header = json.dumps({_HEADER: 1, "options": self._options}).encode() + b"\n"
            self._n_header_bytes = len(header)
            if not self._n_bytes:
                self._write(header)
        except BaseException:
            self._release(remove=os.fstat(self._descriptor).st_size == 0)
            raise
        self._synced_at = time.monotonic()

    # --- what is there already -----------------------------------------------------------------

    def _read_partial(self) -> int:
        """Bytes that count."""
        with open(self.partial, "rb") as file:
            header = file.readline(_COPY_BYTES)
            if not header.endswith(b"\n") and _is_begun_header(header):
                return 0
            self._check_header(header)
            n_bytes = len(header)
            for line in file:
                key = key_of(line)
                if key is None:
                    break
                self._answered.add(key)
                n_bytes += len(line)
        return n_bytes

    def _check_header(self, header: bytes) -> None:
        try:
            told = json.loads(header)
            options = dict(told["options"]) if told[_HEADER] == 1 else None
        except (ValueError, TypeError, KeyError, RecursionError):
            options = None
        if options is None:
            raise BatchError(
                f"{self.partial} was not written by specdec batch: name another output file, or "
                "move that one away"
            )
        for name in sorted({*options, *self._options}):
            before, now = options.get(name), self._options.get(name)
            if before != now:
                raise BatchError(
                    f"{self.partial} was begun with {name} {json.dumps(before)}, now it is "
                    f"{json.dumps(now)}: go on with the same, or remove that file to begin anew"
                )

    def _read_out(self) -> None:
        if not self.out.exists():
            return
        with open(self.out, "rb") as file:
            for line in file:
                key = key_of(line)
                if key is None:
                    raise BatchError(
                        f"{self.out} exists, and specdec batch did not write it: name another "
                        "output file, or remove that one"
                    )
                self._answered.add(key)

    @property
    def n_answered(self) -> int:
        return self._answered.n_lines

    def is_answered(self, key: LineKey) -> bool:
        """Raises BatchError where the line was another one when it was answered."""
        return self._answered.has(key)

    @property
    def begin_anew(self) -> str:
        """The remedy where the output is another batch's."""
        return self._answered.begin_anew

    # --- what is added -------------------------------------------------------------------------

    def append(self, key: LineKey, record: bytes) -> None:
        """Add the record of a line, unless it has one.

        Raises BatchError where it cannot be written; what was written before is kept.
        """
        if not self._answered.add(key):
            return
        self._write(record)
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()
            self._synced_at = time.monotonic()

    def _sync(self) -> None:
        """Some file systems tell only now that there was no room."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._not_written(error) from error

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except BaseException as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._n_bytes)
            if isinstance(error, OSError):
                raise self._not_written(error) from error
            raise
        self._n_bytes += len(data)

    def _not_written(self, error: OSError) -> BatchError:
        return BatchError(
            f"cannot write to {self.partial}: {error.strerror}; what was answered before "
            "is in it: make room, and the same command goes on"
        )

    def finish(self, order: str) -> None:
        """Put OUT in its place. Raises BatchError where it cannot be written."""
        self._sync()
        whole = self.out.with_name(self.out.name + ".whole")
        paths = [path for path in (self.out, self.partial) if path.exists()]
        try:
            with open(whole, "wb") as file:
                for chunk in _in_order(paths, order, self._answered.end):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                whole.unlink()
            raise BatchError(
                f"cannot write {whole}: {error.strerror}; all answers are in {self.partial}: make "
                "room for as much again, and the same command ends it"
            ) from error
        os.replace(whole, self.out)
        _sync_directory(self.out.parent)
        self.is_finished = True

    def close(self) -> None:
        """Leave OUT.partial to be gone on with, unless it has nothing that OUT has not."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.fsync(self._descriptor)
            self._release(remove=self.is_finished or self._n_bytes == self._n_header_bytes)

    def _release(self, *, remove: bool) -> None:
        if remove:
            self.partial.unlink(missing_ok=True)
        os.close(self._descriptor)  # and with it the lock
        self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check_regular(path: Path) -> None:
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise BatchError(f"{path} is no regular file: name one with -o")


def _open_locked(path: Path) -> int:
    """A descriptor that appends, with the lock of this process on the file."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(
                f"cannot write {path}: {error.strerror}; name an output file in a folder that is "
                "there and can be written"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BatchError(
                f"another process writes to {path}: wait for its end, or name another output file"
            ) from None
        except OSError as error:
            os.close(descriptor)
            raise BatchError(
                f"cannot lock {path}: {error.strerror}; name an output file on a disk of this "
                "machine"
            ) from error
        # The process that had the lock may have removed the file since it was opened here.
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _is_begun_header(data: bytes) -> bool:
    """Whether a kill may have cut our first line to this."""
    begin = f'{{"{_HEADER}": '.encode()
    return data.startswith(begin) or begin.startswith(data)


def _in_order(paths: list[Path], order: str, most_lines: int) -> Iterator[bytes]:
    """The records of these files, of two for one line the first."""
    seen = bytearray(most_lines)
    files: list[BinaryIO] = []
    numbers, places, starts, sizes = array("q"), array("b"), array("q"), array("q")
    try:
        for place, path in enumerate(paths):
            files.append(open(path, "rb"))  # noqa: SIM115  # closed below
            offset = 0
            for line in files[place]:
                key = key_of(line)
                if key is not None and not seen[key.number]:
                    seen[key.number] = 1
                    numbers.append(key.number)
                    places.append(place)
                    starts.append(offset)
                    sizes.append(len(line))
                offset += len(line)
        ranked = np.argsort(np.array(numbers, np.int64), kind="stable")
        for index in ranked if order == INPUT else range(len(numbers)):
            yield os.pread(files[places[index]].fileno(), sizes[index], starts[index])
    finally:
        for file in files:
            file.close()


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
