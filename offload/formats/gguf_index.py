"""Location of each tensor of a GGUF model, be it one file or a set of splits.

A split model is `name-00001-of-00003.gguf` and so on, all in one folder. Each of the files carries
`split.no`, `split.count` and `split.tensors.count` (of all files); the first one has the metadata.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from offload.formats.gguf_header import GgufError, GgufFile, GgufMetadata
from offload.formats.tensors import TensorIndex, TensorRecord

__all__ = ["GgufError", "GgufIndex"]

MAX_SPLITS = 1000
_SPLIT_NAME = re.compile(r"(.*-)([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)


class GgufIndex(TensorIndex):
    """All tensors of one model by name, in the order of the files."""

    def __init__(self, files: tuple[GgufFile, ...]) -> None:
        self.files = files
        records: dict[str, TensorRecord] = {}
        for file in files:
            for record in file.tensors:
                if record.name in records:
                    other = records[record.name].path.name
                    raise GgufError(f"{file.path} holds {record.name!r}, which {other} holds too")
                records[record.name] = record
        super().__init__(records, {file.path: file.state for file in files})

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> GgufIndex:
        """Index one file, or all splits where `path` is any one of them.

        Raises:
            GgufError: a file is missing, malformed, or the files are not one model.
        """
        file = GgufFile.read(Path(path))
        count = _split_figure(file, "split.count", 0)
        if count <= 1:
            return cls((file,))
        files = tuple(
            file if split == file.path else GgufFile.read(split)
            for split in _split_paths(file.path, count)
        )
        index = cls(files)
        _check_splits(index)
        return index

    @property
    def metadata(self) -> GgufMetadata:
        """Metadata of the first file."""
        return self.files[0].metadata

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files in the order of the splits; the first is the one to load."""
        return tuple(file.path for file in self.files)


def _split_figure(file: GgufFile, key: str, default: int) -> int:
    if key not in file.metadata:
        return default
    is_list = file.metadata.array_length(key) is not None
    value = None if is_list else file.metadata[key]
    if type(value) is not int or value < 0:
        shown = "a list" if is_list else str(value)[:40]
        raise GgufError(f"{file.path} has {key} of {shown!r}, not a natural number")
    return value


def _split_paths(path: Path, count: int) -> tuple[Path, ...]:
    """Return the files of the set that `path` belongs to; each must exist."""
    if count > MAX_SPLITS:
        raise GgufError(f"{path} claims {count} splits; at most {MAX_SPLITS} are accepted")
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match.group(3)) != count:
        raise GgufError(
            f"{path} is one of {count} splits but is not named like NAME-00001-of-{count:05d}.gguf,"
            " so the others cannot be found; give the files their original names"
        )
    stem = match.group(1)
    paths = tuple(path.with_name(f"{stem}{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
    missing = [split.name for split in paths if not split.exists()]
    if missing:
        raise GgufError(
            f"{path} is one of {count} splits, of which {len(missing)} are missing beside it "
            f"({missing[0]} is the first): get all of them"
        )
    return paths


def _check_splits(index: GgufIndex) -> None:
    first = index.files[0]
    count = len(index.files)
    for number, file in enumerate(index.files):
        if _split_figure(file, "split.count", 0) != count:
            raise GgufError(f"{file.path} is not one of {count} splits as {first.path.name} is")
        if (result := _split_figure(file, "split.no", -1)) != number:
            raise GgufError(f"{file.path} is split number {result + 1} by its header; rename it")
    n_tensors = _split_figure(first, "split.tensors.count", len(index))
    if n_tensors != len(index):
        raise GgufError(
            f"{first.path} says that all splits hold {n_tensors} tensors, but they hold "
            f"{len(index)}: the files do not belong together, get them again"
        )
