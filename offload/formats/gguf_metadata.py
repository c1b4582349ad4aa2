"""The key-value part of a GGUF header, an untrusted input, read in bounded memory.

A vocabulary is megabytes of strings that a run without its own tokenizer never uses. So arrays and
long strings are only measured when the header is read; they are decoded from the file on access.
Every length is checked against the limits and the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from offload.formats.tensors import CheckpointError
from offload.units import KIB, MIB, format_bytes

MAX_HEADER_BYTES = 256 * MIB  # 300,000 tokens with their merges need about 20 MiB
MAX_METADATA = 2**14  # a file has about 50
MAX_KEY_BYTES = 1024
MAX_STRING_BYTES = 64 * MIB  # some files carry a whole tokenizer.json
MAX_ARRAY_LENGTH = 2**22
MAX_STRINGS = 2**21  # of all arrays together: going through them is what takes time
_WINDOW_BYTES = MIB
_EAGER_STRING_BYTES = 4 * KIB

Scalar = int | float | bool | str
Value = Scalar | list[int] | list[float] | list[bool] | list[str]


class GgufError(CheckpointError):
    """The GGUF file is missing, incomplete, malformed or of a kind that is refused."""


@dataclass(frozen=True)
class _ValueType:
    name: str
    n_bytes: int  # 0: a length and that many bytes
    dtype: str = ""


_STRING = _ValueType("str", 0)
_VALUE_TYPES = {
    0: _ValueType("u8", 1, "<u1"),
    1: _ValueType("i8", 1, "<i1"),
    2: _ValueType("u16", 2, "<u2"),
    3: _ValueType("i16", 2, "<i2"),
    4: _ValueType("u32", 4, "<u4"),
    5: _ValueType("i32", 4, "<i4"),
    6: _ValueType("f32", 4, "<f4"),
    7: _ValueType("bool", 1, "<u1"),
    8: _STRING,
    10: _ValueType("u64", 8, "<u8"),
    11: _ValueType("i64", 8, "<i8"),
    12: _ValueType("f64", 8, "<f8"),
}
_ARRAY_CODE = 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")

DAMAGED = "the file is damaged, download it again"


class Cursor:
    """Reads the header of an open file in order; at most one window of it is in memory."""

    def __init__(self, file: BinaryIO, path: Path, file_bytes: int) -> None:
        self.path = path
        self.file_bytes = file_bytes
        self.n_strings = 0  # in arrays, so far
        self._file = file
        self._end = min(file_bytes, MAX_HEADER_BYTES)
        self._window = b""
        self._start = 0  # of the window in the file
        self._at = 0  # within the window

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def n_left(self) -> int:
        """Maximum number of bytes left in the header."""
        return self._end - self.position

    def refuse(self, reason: str, remedy: str = DAMAGED) -> GgufError:
        return GgufError(f"{self.path} {reason}: {remedy}")

    def u32(self) -> int:
        return int(_U32.unpack(self.take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack(self.take(8))[0])

    def take(self, n_bytes: int) -> bytes:
        """Return the next bytes, few enough for a window (`n_bytes` was checked)."""
        if self._at + n_bytes > len(self._window):
            self._refill(n_bytes)
        start = self._at
        self._at += n_bytes
        return self._window[start : self._at]

    def skip(self, n_bytes: int) -> None:
        self.check_left(n_bytes)
        if self._at + n_bytes <= len(self._window):
            self._at += n_bytes
        else:
            self._start, self._at, self._window = self.position + n_bytes, 0, b""

    def name(self, what: str, max_bytes: int) -> str:
        """Return a key or a tensor's name: short printable UTF-8."""
        n_bytes = self.u64()
        if not 1 <= n_bytes <= max_bytes:
            raise self.refuse(f"has a {what} of {n_bytes} bytes; 1 to {max_bytes} are accepted")
        raw = self.take(n_bytes)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            text = ""
        if not text.isprintable() or not text:
            raise self.refuse(f"has the {what} {raw[:40]!r}, which is not printable UTF-8")
        return text

    def skip_strings(self, count: int) -> None:
        self.n_strings += count
        if self.n_strings > MAX_STRINGS:
            raise self.refuse(f"holds more than {MAX_STRINGS} strings in the arrays of its header")
        unpack = _U64.unpack_from
        while count:
            # Skips the strings that lie within the window, without a call for each.
            window, at, end = self._window, self._at, len(self._window)
            while count and at + 8 <= end:
                (n_bytes,) = unpack(window, at)
                if n_bytes > end - at - 8:
                    break
                at += 8 + n_bytes
                count -= 1
            self._at = at
            if count:
                self.skip(self.string_bytes())
                count -= 1

    def string_bytes(self) -> int:
        """Return the length in front of a string, checked."""
        n_bytes = self.u64()
        if n_bytes > MAX_STRING_BYTES:
            limit = format_bytes(MAX_STRING_BYTES)
            raise self.refuse(f"has a string of {n_bytes} bytes; at most {limit} is accepted")
        self.check_left(n_bytes)
        return n_bytes

    def check_left(self, n_bytes: int) -> None:
        """Raise unless the header can have `n_bytes` more bytes."""
        if n_bytes <= self.n_left:
            return
        if self._end < self.file_bytes:
            limit = format_bytes(MAX_HEADER_BYTES)
            raise self.refuse(f"has a header of more than {limit}, which is not accepted")
        raise self.refuse(
            f"has {self.file_bytes} bytes and ends inside its header",
            "it seems to be cut; download it again",
        )

    def _refill(self, n_bytes: int) -> None:
        self.check_left(n_bytes)
        self._start, self._at = self.position, 0
        self._file.seek(self._start)
        self._window = self._file.read(min(max(n_bytes, _WINDOW_BYTES), self._end - self._start))
        if len(self._window) < n_bytes:
            raise self.refuse("became shorter while its header was read")


@dataclass(frozen=True)
class _Entry:
    """A value, or its place in the file."""

    type: _ValueType
    value: Scalar | None = None
    count: int | None = None  # elements of an array
    offset: int = 0
    n_bytes: int = 0


class GgufMetadata(Mapping[str, Value]):
    """The key-value pairs of one file.

    Arrays and long strings are decoded at every access and not cached: read them once. Invalid
    UTF-8 becomes U+FFFD; in arrays of strings (vocabularies) it becomes surrogate escapes, which
    lose nothing.
    """

    def __init__(self, path: Path, entries: Mapping[str, _Entry]) -> None:
        self._path = path
        self._entries = entries

    def __getitem__(self, key: str) -> Value:
        entry = self._entries[key]
        return self._load(key, entry) if entry.value is None else entry.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def array_length(self, key: str) -> int | None:
        """Return the elements of array `key` without decoding it; None if missing or no array."""
        entry = self._entries.get(key)
        return None if entry is None else entry.count

    def type_name(self, key: str) -> str:
        """Return the type's name in llama.cpp: "u32", "str", "arr[str]"."""
        entry = self._entries[key]
        return entry.type.name if entry.count is None else f"arr[{entry.type.name}]"

    def _load(self, key: str, entry: _Entry) -> Value:
        try:
            with self._path.open("rb") as file:
                file.seek(entry.offset)
                raw = file.read(entry.n_bytes)
        except OSError as error:
            raise GgufError(f"cannot read {self._path}: {error.strerror or error}") from error
        if len(raw) < entry.n_bytes:
            raise GgufError(f"{self._path} became shorter than it was when it was opened")
        if entry.count is None:
            return raw.decode("utf-8", "replace")
        if entry.type is _STRING:
            return self._split_strings(raw, entry.count)
        array = np.frombuffer(raw, dtype=entry.type.dtype)
        values: Value = (array != 0 if entry.type.name == "bool" else array).tolist()
        return values

    def _split_strings(self, raw: bytes, count: int) -> list[str]:
        strings, at, unpack = [], 0, _U64.unpack_from
        for _ in range(count):
            # The bytes were checked once; the file may have been overwritten since.
            end = at + 8 + unpack(raw, at)[0] if at + 8 <= len(raw) else len(raw) + 1
            if end > len(raw):
                raise GgufError(f"{self._path} was overwritten while it was in use")
            strings.append(raw[at + 8 : end].decode("utf-8", "surrogateescape"))
            at = end
        return strings


def read_metadata(cursor: Cursor, n_pairs: int) -> GgufMetadata:
    """Read the `n_pairs` (checked) key-value pairs from the cursor's position on."""
    entries: dict[str, _Entry] = {}
    for _ in range(n_pairs):
        key = cursor.name("metadata key", MAX_KEY_BYTES)
        if key in entries:
            raise cursor.refuse(f"has the metadata key {key[:200]!r} twice")
        code = cursor.u32()
        if code == _ARRAY_CODE:
            entries[key] = _measure_array(cursor, key)
        else:
            entries[key] = _read_scalar(cursor, _value_type(cursor, key, code))
    return GgufMetadata(cursor.path, entries)


def _value_type(cursor: Cursor, key: str, code: int) -> _ValueType:
    if code == _ARRAY_CODE:
        raise cursor.refuse(f"has an array of arrays in {key[:200]!r}, which is not supported")
    if code not in _VALUE_TYPES:
        raise cursor.refuse(f"has a value of the unknown type {code} in {key[:200]!r}")
    return _VALUE_TYPES[code]


def _read_scalar(cursor: Cursor, kind: _ValueType) -> _Entry:
    if kind is not _STRING:
        value = np.frombuffer(cursor.take(kind.n_bytes), dtype=kind.dtype)[0].item()
        return _Entry(kind, value != 0 if kind.name == "bool" else value)
    n_bytes = cursor.string_bytes()
    if n_bytes <= _EAGER_STRING_BYTES:
        return _Entry(kind, cursor.take(n_bytes).decode("utf-8", "replace"))
    entry = _Entry(kind, offset=cursor.position, n_bytes=n_bytes)
    cursor.skip(n_bytes)
    return entry


def _measure_array(cursor: Cursor, key: str) -> _Entry:
    kind = _value_type(cursor, key, cursor.u32())
    count = cursor.u64()
    if count > MAX_ARRAY_LENGTH:
        raise cursor.refuse(
            f"claims {count} elements in {key[:200]!r}; at most {MAX_ARRAY_LENGTH} are accepted"
        )
    cursor.check_left(count * (kind.n_bytes or 8))  # a string takes its length's 8 bytes at least
    start = cursor.position
    if kind is _STRING:
        cursor.skip_strings(count)
    else:
        cursor.skip(count * kind.n_bytes)
    return _Entry(kind, count=count, offset=start, n_bytes=cursor.position - start)
