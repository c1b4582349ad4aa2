"""PrefixFiles: KV of prefixes in a folder, for this process and later ones.

Any number of processes and models may share the folder. A file has one model's KV of one prefix:

    <16 digits of the model's fingerprint>-<32 digits of the tokens' SHA-256>.safetensors

It is written under another name and renamed when it is complete, and carries checksums of its
content, which are compared before it is used. A file that is damaged, or not of this format, is
ignored with a note. When the folder is full, the files that were used last are kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backends.contract.backend import BackendError, KvFileError
from backends.contract.sequence import SequenceKV, common_length
from offload.formats.mapped import LazyMapping, TensorShape, file_bytes, write_mapped
from offload.formats.part import read_part
from offload.formats.safetensors import read_header_and_metadata
from offload.formats.tensors import CheckpointError
from offload.storage.checked_tensors import CheckedTensors

logger = logging.getLogger(__name__)
FORMAT = "specdec prefix 2"
FILE_SECONDS = 0.01
"""Fixed cost of writing a KV file and reading it again."""
FILE_BYTES_PER_SECOND = 200e6
"""Bandwidth of each direction on a slow disk, assumed until a file has been read. On a faster disk
a file would already pay for fewer tokens, but only few are lost: 15 tokens of a 3B in bf16 take
60 ms."""
_TOKENS, _RANGES = "token_ids", "restorable"
_SUFFIX = ".safetensors"
_NAME = re.compile(r"[0-9a-f]{16}-[0-9a-f]{32}\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}-[0-9a-f]{32}\.safetensors\..*")
_UNFINISHED_SECONDS = 3600.0
"""Age from which an unfinished file is taken for one of a process that was killed."""
_MIN_TIMED_BYTES = 2**20
_NUM_AHEAD = 2
"""Tensors that are read while others are copied: a layer's keys and values."""

Ranges = Sequence[tuple[int, int]]
"""(first, last) lengths that a prefix can be cut to."""


class StoredPrefix(NamedTuple):
    """A file, and how much of it serves a prompt."""

    name: str
    token_ids: list[int]
    ranges: Ranges
    n_bytes: int
    length: int = 0
    """Common tokens with the prompt that its KV can be cut to."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def restorable(self, length: int) -> int:
        """See SequenceKV.restorable."""
        return max((min(b, length) for a, b in self.ranges if a <= length), default=0)


class PrefixFiles:
    """The files of one model in a folder.

    Args:
        fingerprint: of all that the KV depends on: weights, cache types, device, library, ...
        max_bytes: maximum bytes of the files of all models.
        free_memory: return whether so many bytes of memory, for tensors of a file, can be had.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        vocab_size: int,
        max_context: int,
        max_bytes: int,
        free_memory: Callable[[int], bool] = lambda n_bytes: True,
    ) -> None:
        self._folder, self._fingerprint = folder, fingerprint
        self._vocab_size, self._max_context = vocab_size, max_context
        self._max_bytes, self._free_memory = max_bytes, free_memory
        self._bytes_per_second = FILE_BYTES_PER_SECOND
        self._prefixes: dict[str, StoredPrefix] = {}
        self._ignored: dict[str, int] = {}  # name -> time of change
        self._notes: set[str] = set()
        self._remove_unfinished()

    # --- reading ---------------------------------------------------------------------------

    def read_seconds(self, n_bytes: int) -> float:
        """Return the seconds that reading a file takes, as far as is known."""
        return FILE_SECONDS + n_bytes / self._bytes_per_second

    def longest(self, token_ids: list[int]) -> StoredPrefix | None:
        """Return the file with the longest prefix of these tokens; the smallest of equal ones."""
        self._refresh()
        best: StoredPrefix | None = None
        for stored in self._prefixes.values():
            length = stored.restorable(common_length(stored.token_ids, token_ids))
            key = (length, -stored.n_bytes)
            if length and (best is None or key > (best.length, -best.n_bytes)):
                best = stored._replace(length=length)
        return best

    def n_common(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens a file has."""
        stored = self.longest(list(token_ids))
        return 0 if stored is None else stored.length

    def load(self, stored: StoredPrefix, kv: SequenceKV, n_growth_bytes: int = 0) -> bool:
        """Load a file into an empty sequence; if that fails, return False and leave it empty.

        n_growth_bytes: memory that the KV cache may take for it.
        """
        path, began = self._folder / stored.name, time.perf_counter()
        try:
            with closing(CheckedTensors(path)) as file:
                if not self._read_ahead(file, n_growth_bytes):
                    return False
                if bytes(file[_TOKENS][1]) != _token_bytes(stored.token_ids):
                    raise CheckpointError(f"{path} has other tokens than before")
                shapes = {name: shape for name, shape in file.records.items() if name != _TOKENS}
                kv.load_prefix(stored.token_ids, LazyMapping(shapes, file.__getitem__))
            os.utime(path)  # it was used now
        except KvFileError as error:  # of another file: this one is good
            self._note(f"a prompt is computed, not loaded: {error}")
            return False
        except (CheckpointError, BackendError, OSError) as error:
            self._ignore(stored.name, str(error))
            return False
        if stored.n_bytes >= _MIN_TIMED_BYTES:
            self._bytes_per_second = stored.n_bytes / (time.perf_counter() - began)
        return True

    def _read_ahead(self, file: CheckedTensors, n_growth_bytes: int) -> bool:
        """Set how many tensors are read ahead; return whether there is memory for any."""
        for num_ahead in (_NUM_AHEAD, 0):
            if self._free_memory(file.staged_bytes(num_ahead) + n_growth_bytes):
                file.num_ahead = num_ahead
                return True
        return False

    def _refresh(self) -> None:
        """Look for files that came or went: other processes write and delete, too."""
        names = set()
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_SUFFIX) and not entry.name.startswith("."):
                        names.add(entry.name)
        except OSError as error:
            self._note(f"the prompt cache folder {self._folder} cannot be read: {error.strerror}")
        for name in self._prefixes.keys() - names:
            del self._prefixes[name]
        own = self._fingerprint[:16]
        for name in sorted(names - self._prefixes.keys()):
            if name.startswith(own) or not _NAME.fullmatch(name):
                self._open(name)

    def _open(self, name: str) -> None:
        path = self._folder / name
        try:
            if self._ignored.get(name) == path.stat().st_mtime_ns:
                return
            stored = self._read(path)
        except FileNotFoundError:
            return
        except (CheckpointError, OSError, ValueError) as error:
            self._ignore(name, str(error))
            return
        if stored is not None:
            self._prefixes[name] = stored

    def _read(self, path: Path) -> StoredPrefix | None:
        """Return a file's tokens, None if it is another model's. Raises CheckpointError."""
        metadata, records = read_header_and_metadata(path)
        if metadata.get("format") != FORMAT or _TOKENS not in records:
            raise CheckpointError(f"{path} is no prefix of this version of specdec")
        if metadata.get("model") != self._fingerprint:
            return None
        tokens = records[_TOKENS]
        ids = np.frombuffer(read_part(path, tokens.offset, tokens.n_bytes), dtype="<i4")
        if tokens.dtype != "I32" or not len(ids) or not 0 <= ids.min() <= ids.max():
            raise CheckpointError(f"{path} has no tokens")
        if ids.max() >= self._vocab_size:
            raise CheckpointError(f"{path} has tokens outside of the vocabulary")
        if len(ids) > self._max_context:
            return None
        ranges = [(int(a), int(b)) for a, b in json.loads(metadata.get(_RANGES, "[]"))]
        if not all(0 < a <= b <= len(ids) for a, b in ranges):
            raise CheckpointError(f"{path} has lengths outside of its {len(ids)} tokens")
        return StoredPrefix(path.name, ids.tolist(), ranges, path.stat().st_size)

    def _ignore(self, name: str, reason: str) -> None:
        """Ignore a file until it is replaced; note that, unless it is gone."""
        self._prefixes.pop(name, None)
        path = self._folder / name
        try:
            self._ignored[name] = path.stat().st_mtime_ns
        except OSError:
            return
        reason = reason.removesuffix("; download it again")
        self._note(f"a file of the prompt cache is ignored: {reason} (remove {path})")

    # --- writing ---------------------------------------------------------------------------

    def write(self, kv: SequenceKV, seconds: float) -> bool:
        """Write the committed prefix of a sequence, if writing and reading it takes less than
        `seconds` and there is space; return whether it was written."""
        token_ids, ranges = list(kv.committed_ids), kv.restorable_ranges
        tensors = [TensorShape(_TOKENS, "I32", (len(token_ids),)), *kv.prefix_tensors()]
        metadata = {"format": FORMAT, "model": self._fingerprint, _RANGES: json.dumps(ranges)}
        n_bytes = file_bytes(tensors, metadata)
        if seconds <= 2 * self.read_seconds(n_bytes) or n_bytes > self._max_bytes:
            return False
        if not self._free_memory(max(tensor.n_bytes for tensor in tensors)):
            return False
        digest = hashlib.sha256(self._fingerprint.encode() + _token_bytes(token_ids)).hexdigest()
        name = f"{self._fingerprint[:16]}-{digest[:32]}{_SUFFIX}"

        def fill(buffers: Mapping[str, memoryview]) -> None:
            buffers[_TOKENS][:] = _token_bytes(token_ids)
            kv.save_prefix(buffers)

        try:
            self._remove_oldest(self._max_bytes - n_bytes)
            write_mapped(self._folder / name, tensors, metadata, fill)
        except KvFileError as error:
            self._note(f"a prompt is not saved: {error}")
            return False
        except (OSError, BackendError) as error:
            reason = getattr(error, "strerror", None) or error
            self._note(f"the prompt cache {self._folder} cannot be written: {reason}")
            return False
        self._ignored.pop(name, None)
        self._open(name)
        self._remove_covered(token_ids, ranges)
        return True

    def _remove_covered(self, token_ids: list[int], ranges: Ranges) -> None:
        """Remove files of beginnings of these tokens, if these can be cut to the same lengths."""
        for name, stored in list(self._prefixes.items()):
            is_start = stored.num_tokens < len(token_ids)
            is_start = is_start and stored.token_ids == token_ids[: stored.num_tokens]
            if is_start and all(
                any(a <= c and d <= b for a, b in ranges) for c, d in stored.ranges
            ):
                del self._prefixes[name]
                with suppress(OSError):
                    os.unlink(self._folder / name)

    def _remove_oldest(self, max_bytes: int) -> None:
        """Remove the files of any model that were not used for the longest time."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # by another process
                        status = entry.stat()
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
        n_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if n_bytes <= max_bytes:
                return
            with suppress(FileNotFoundError):
                os.unlink(path)
            n_bytes -= size

    def _remove_unfinished(self) -> None:
        """Remove what killed processes left."""
        with suppress(OSError):
            for path in self._folder.iterdir():
                is_old = time.time() - path.lstat().st_mtime > _UNFINISHED_SECONDS
                if _UNFINISHED.fullmatch(path.name) and is_old:
                    path.unlink()

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            logger.warning(text)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()
