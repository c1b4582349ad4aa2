"""Lines of an input file, numbered from 1, limited in length and hashed."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

from offload.errors import SpecdecError
from offload.units import MIB
from specdec.opening import open_now

MAX_LINE_BYTES = 16 * MIB
"""Longest line that is read; a prompt beyond it exceeds any context."""
_BLANK = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class BatchError(SpecdecError):
    """A batch cannot begin, or go on."""


@dataclass(frozen=True)
class Line:
    """Non-blank line of the input."""

    number: int
    """Line number from 1; blank lines are counted."""
    digest: int
    """64-bit hash of its bytes and of the options that it is answered with; never 0."""
    data: bytes
    """Bytes without the line end; empty if the line is longer than MAX_LINE_BYTES."""
    n_bytes: int

    @property
    def key(self) -> LineKey:
        return LineKey(self.number, self.digest)


@dataclass(frozen=True)
class LineKey:
    """Identity of the line that a record answers: its number and its digest."""

    number: int
    digest: int

    @property
    def hex_digest(self) -> str:
        return f"{self.digest:016x}"

    def __str__(self) -> str:
        return f"{self.number}_{self.hex_digest}"


def digest_key(options: Mapping[str, Any]) -> bytes:
    """Return the hash key for digests of lines that are answered with these options."""
    return blake2b(json.dumps(options, sort_keys=True).encode(), digest_size=32).digest()


def open_input(path: Path) -> BinaryIO:
    """Open an input file. Raises BatchError if it is no regular file, OSError."""
    file = open_now(path)
    if not stat.S_ISREG(path.stat().st_mode):
        file.close()
        raise BatchError(
            f"{path} is no regular file: a batch reads its input once more when it is resumed; "
            "save it to a file first"
        )
    return file


def check_input(path: Path) -> None:
    """Raise BatchError if the input is no regular file or has no line to answer; also OSError."""
    if next(read_lines(path, b""), None) is None:
        raise BatchError(
            f"{path} has no line to answer in its {path.stat().st_size} bytes: give a file with a "
            "request a line"
        )


def read_lines(path: Path, key: bytes) -> Iterator[Line]:
    """Yield the non-blank lines, at most one of them in memory. key: see `digest_key`."""
    with open_input(path) as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            content = data.rstrip(_BLANK)
            hashed = blake2b(content, digest_size=8, key=key)
            n_bytes = len(content)
            if len(data) > MAX_LINE_BYTES and not data.endswith(b"\n"):
                n_bytes, content = len(data), b""
                while tail := file.readline(MIB):
                    hashed.update(tail)
                    n_bytes += len(tail)
                    if tail.endswith(b"\n"):
                        break
            if n_bytes:
                digest = int.from_bytes(hashed.digest(), "big") or 1
                yield Line(number, digest, content, n_bytes)
