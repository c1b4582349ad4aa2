"""Packing of a checkpoint: fewer bytes per pass, and the same weights to the bit.

Only the matrices of the decoder layers are packed, which every pass reads. The copy is written
beside its destination under a hidden name and moved there at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.packed.errors import PackError
from backends.packed.kernels import check_numba
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import TensorIndex
from offload.process.cpus import usable_cpus
from offload.storage.unfinished import unfinished
from offload.units import MIB, Progress, format_bytes
from specdec.models.names import resolve_model
from specdec.packing.destination import place_of, refuse_inside, writing
from specdec.packing.source import check_source, files_beside, is_mixture, is_quantised

if TYPE_CHECKING:
    from backends.hf.model import HfModel
    from backends.packed.writer import WrittenTensor

_INDEX = "model.safetensors.index.json"
_MARGIN_BYTES = 16 * MIB
"""Allowance for headers and blocks of the file system."""
_MAX_THREADS = 4
_NAMED = 10


@dataclass(frozen=True)
class PackReport:
    """Result of packing."""

    path: Path
    source_bytes: int
    """Bytes of all tensors in the source."""
    n_bytes: int
    n_packed: int
    n_others: int
    """Tensors that are no matrices of decoder layers, or too small to be packed."""
    not_packed: dict[str, float]
    """Matrices with too many exponents, by name: the share of weights with a rare exponent."""
    is_verified: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        share = self.n_bytes / max(self.source_bytes, 1)
        compared = "every weight compared" if self.is_verified else "not compared (--no-verify)"
        lines = [
            f"{self.path}: {format_bytes(self.n_bytes)} of {format_bytes(self.source_bytes)} "
            f"({share:.1%}); {self.n_packed} tensors packed, {self.n_others} others as they "
            f"were; {compared}"
        ]
        named = list(self.not_packed.items())
        lines += [
            f"{name} stays bf16: {rare:.1%} of the weights looked at have rare exponents"
            for name, rare in named[:_NAMED]
        ]
        if len(named) > _NAMED:
            lines.append(f"so do {len(named) - _NAMED} more tensors")
        return lines


def pack(
    model: str | Path, out: Path, *, verify: bool = True, progress: Progress | None = None
) -> PackReport:
    """Write a packed copy of a checkpoint in bf16 to the folder `out`.

    Args:
        verify: compare every weight with the source.
        progress: called by several threads.

    Raises:
        SpecdecError: `out` is there already, lies in the model or cannot be written, all found
            before the model is read; the extra `pack` is missing, so that the copy would not run
            here; the model cannot be read or packed, the disk lacks space; one line, and nothing is
            left behind.
    """
    place = place_of(out)
    out = Path(out).expanduser().absolute()
    directory = resolve_model(model)
    refuse_inside(out, place, directory)
    check_source(directory)
    check_numba()
    beside_weights = files_beside(directory)

    # These imports take seconds: checks without them come first.
    from backends.hf.loading import load_hf_model
    from backends.packed.writer import pays_to_pack

    with unfinished(place) as partial:
        with writing(out):
            partial.mkdir(parents=True)
        source = load_hf_model(directory)
        _check_built(source, directory)
        matrices = frozenset(
            bound.record.name
            for layer in source.layer_tensors
            for bound in layer
            if pays_to_pack(bound.record)
        )
        if not matrices:
            raise PackError(f"{directory} has no matrix that is large enough to be packed")
        _check_disk_space(source, matrices, beside_weights.values(), place)
        with writing(out):
            written = _write_weights(source, matrices, partial, verify, progress)
            for name, path in beside_weights.items():
                shutil.copyfile(path, partial / name)
            _check_headers(source, partial)
            for path in (*(partial / name for name in beside_weights), partial):
                _sync(path)
            source.index.check_unchanged()
            partial.rename(place)
            _sync(place.parent)
    return _report(out, written, verify)


def _check_built(source: HfModel, directory: Path) -> None:
    """Raise PackError for problems that `check_source` cannot find."""
    if source.packed_modules:
        raise is_quantised(directory)
    if source.experts:
        raise is_mixture(directory)


def _check_disk_space(
    source: HfModel, matrices: frozenset[str], beside_weights: Iterable[Path], place: Path
) -> None:
    """Raise PackError where the disk lacks the minimum that the copy may take."""
    from backends.packed.writer import min_bytes

    needed = _MARGIN_BYTES + sum(
        min_bytes(record) if record.name in matrices else record.n_bytes
        for record in source.index.values()
    )
    needed += sum(path.stat().st_size for path in beside_weights)
    free = shutil.disk_usage(place.parent).free  # the copy is written there
    if needed > free:
        raise PackError(
            f"{place} would take {format_bytes(needed)} and {place.parent} has "
            f"{format_bytes(free)} free: free some space, or name a folder elsewhere"
        )


def _write_weights(
    source: HfModel,
    matrices: frozenset[str],
    folder: Path,
    verify: bool,
    progress: Progress | None,
) -> list[WrittenTensor]:
    from backends.packed.writer import FileWriter

    paths = list(dict.fromkeys(record.path for record in source.index.values()))
    names = [f"model-{i:05d}-of-{len(paths):05d}.safetensors" for i in range(1, len(paths) + 1)]
    if len(paths) == 1:
        names = ["model.safetensors"]
    counter = _Counter(source.index.total_bytes * (2 if verify else 1), progress)
    n_threads = min(_MAX_THREADS, usable_cpus())
    written: list[WrittenTensor] = []
    places: dict[str, str] = {}
    for path, name in zip(paths, names, strict=True):
        writer = FileWriter(
            path,
            folder / name,
            # A tensor that a later file repeats is copied unpacked.
            frozenset(n for n in matrices if source.index[n].path == path),
            n_threads=n_threads,
            verify=verify,
            advance=counter.add,
        )
        tensors = writer.write()
        written += tensors
        places.update({tensor.name: name for tensor in tensors})
    if len(paths) > 1:
        n_bytes = sum(tensor.n_bytes for tensor in written)
        index = {"metadata": {"total_size": n_bytes}, "weight_map": places}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _sync(folder / _INDEX)
    return written


def _check_headers(source: HfModel, partial: Path) -> None:
    """Raise SpecdecError where the copy cannot be opened, or lacks tensors of the source."""

    def described(index: TensorIndex) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (record.dtype, record.shape) for name, record in index.items()}

    if (
        not described(source.index).items()
        <= described(WeightIndex.from_directory(partial)).items()
    ):
        raise PackError(f"{partial} does not list the tensors of its source: this is a bug")


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _report(out: Path, written: list[WrittenTensor], verify: bool) -> PackReport:
    tried = {tensor.name: tensor.exceptions for tensor in written if tensor.exceptions is not None}
    packed = {tensor.name for tensor in written if tensor.scheme}
    return PackReport(
        out,
        sum(tensor.source_bytes for tensor in written),
        sum(tensor.n_bytes for tensor in written),
        len(packed),
        len(written) - len(tried),
        {name: share for name, share in tried.items() if name not in packed},
        verify,
    )


class _Counter:
    """Progress in bytes, counted by several threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(min(self._done, self._total), self._total)
