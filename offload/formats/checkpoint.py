"""Location of each tensor of a safetensors checkpoint; only the headers are read.

Only files inside the checkpoint's folder (or the Hugging Face cache it belongs to) are opened, and
pickled weights are refused: see `safetensors` for the file format and its checks.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from offload.formats.lfs import refuse_pointer
from offload.formats.packed import with_packed
from offload.formats.safetensors import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    parse_json_object,
    read_header_and_metadata,
)
from offload.formats.tensors import (
    CheckpointError,
    FileState,
    TensorIndex,
    TensorRecord,
    file_state,
)
from offload.units import format_bytes

_SINGLE = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class WeightIndex(TensorIndex):
    """All tensors of one checkpoint by name."""

    def __init__(
        self,
        records: Mapping[str, TensorRecord],
        states: Mapping[Path, FileState],
        directory: Path,
    ) -> None:
        super().__init__(records, states)
        self.directory = directory

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> WeightIndex:
        """Index `model.safetensors`, or the shards that a `*.safetensors.index.json` names.

        As in transformers, all tensors of these files are included, wherever the index places them,
        and of two with one name the one in the last file by name is used.

        Raises:
            CheckpointError: the checkpoint is refused; the message names the file.
        """
        root = Path(directory)
        if not root.is_dir():
            raise CheckpointError(f"{root} is not a directory; pass the folder of a checkpoint")
        records: dict[str, TensorRecord] = {}
        states: dict[Path, FileState] = {}
        for shard in find_shards(root, (path.name for path in root.iterdir())):
            path = resolve_within(root, shard)
            states[path] = file_state(path)
            metadata, result = read_header_and_metadata(path)
            for name, record in with_packed(path, metadata, result).items():
                records.pop(name, None)  # so that records are in the order of the files
                records[name] = record
        return cls(records, states, root)


def main_format(index: Mapping[str, TensorRecord]) -> str:
    """Return the number format of most bytes, counted after decoding packed tensors."""
    n_bytes: dict[str, int] = {}
    for record in index.values():
        # Not record.n_bytes: a packed copy is computed in the format of its source.
        decoded_bytes = math.prod(record.shape) * DTYPE_BITS[record.dtype] // 8
        n_bytes[record.dtype] = n_bytes.get(record.dtype, 0) + decoded_bytes
    return max(n_bytes, key=lambda key: n_bytes[key])


def find_shards(root: Path, listed: Iterable[str]) -> list[str]:
    """Return the names of the files that make up a checkpoint, in order.

    Args:
        root: folder of the index, if there is one; its other files may be elsewhere.
        listed: names of the checkpoint's files.

    Raises CheckpointError where there is no checkpoint in safetensors.
    """
    names = sorted(listed)
    # The same precedence as transformers: the single file first, unless it is a dangling link.
    if _SINGLE in names and not ((root / _SINGLE).is_symlink() and not (root / _SINGLE).exists()):
        return [_SINGLE]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if "model.safetensors.index.json" in indexes:
        indexes = ["model.safetensors.index.json"]
    if len(indexes) > 1:
        raise CheckpointError(f"{root} holds several indexes ({', '.join(indexes)}); keep one")
    if indexes:
        return _read_shards(root / indexes[0])
    single = [name for name in names if name.endswith(".safetensors")]
    if len(single) == 1:
        return single
    raise CheckpointError(_explain_no_weights(root, names, single))


def _explain_no_weights(root: Path, names: list[str], single: list[str]) -> str:
    if single:
        return f"{root} holds {len(single)} .safetensors files but no index.json; download it again"
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{root} holds only pickled weights ({pickles[0]}), which can run code when loaded and "
            "are refused; convert them to safetensors"
        )
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return f"{root} holds GGUF ({gguf[0]}), name that file instead of the folder"
    return (
        f"{root} holds no model.safetensors and no *.safetensors.index.json; "
        "download the checkpoint again"
    )


def _read_shards(path: Path) -> list[str]:
    """Return the file names in an index, sorted; its assignment of tensors to them is ignored."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path} is not a regular file of at most {format_bytes(MAX_HEADER_BYTES)}"
            )
        refuse_pointer(path)
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    weight_map = parse_json_object(text, path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_shard_name(shard):
            raise CheckpointError(
                f"{path} places {name!r} in {shard!r}, which is not a plain .safetensors file "
                "name; download it again"
            )
    return sorted(set(weight_map.values()))


def _is_plain_shard_name(shard: str) -> bool:
    if any(character in shard for character in "/\\:\0"):
        return False
    return shard.endswith(".safetensors") and not shard.startswith(".")


def resolve_within(root: Path, name: str) -> Path:
    """Return the file's real path, which must lie in `root` or in the cache that it belongs to.

    Raises CheckpointError.
    """
    path = root / name
    try:
        real = path.resolve(strict=True)
        real_root = root.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symlinks, before Python 3.13
        raise CheckpointError(
            f"{path} is missing or cannot be resolved; download the checkpoint again"
        ) from error
    if real.parent != real_root and not _is_cache_blob(real_root, real):
        raise CheckpointError(
            f"{path} is a link to {real}, outside of the checkpoint's folder; "
            "replace the link by the file"
        )
    return real


def _is_cache_blob(root: Path, real: Path) -> bool:
    """Return whether `root` is a snapshot of a Hugging Face cache and `real` a blob of that cache.

    The layout is `<cache>/models--a--b/{snapshots/<commit>/<links>, blobs/<hash>}`; newer versions
    add `<cache>/blobs/<first two letters>/<hash>`, shared by all repositories.
    """
    if root.parent.name != "snapshots":
        return False
    repository = root.parent.parent
    shared = repository.parent / "blobs" / real.name[:2]
    return real.parent in (repository / "blobs", shared)
