"""Where a grown model goes: is there room, and is what lies there already ours to replace?"""

from __future__ import annotations

import shutil
from pathlib import Path

from bench.synth.shapes import SynthError
from offload.units import MIB, format_bytes

_MARGIN_BYTES = 16 * MIB  # headers, config, tokenizer, index, file-system blocks


def check_folder(out_dir: Path, source_dir: Path, n_bytes: int, force: bool) -> None:
    """Raises a SynthError if the folder `out_dir` may not be written or its disk lacks room."""
    destination, source = out_dir.resolve(), source_dir.resolve()
    if destination == source or destination in source.parents:
        raise SynthError(f"{out_dir} holds the source model; choose another folder")
    if out_dir.exists() and not out_dir.is_dir():
        raise SynthError(f"{out_dir} is a file; choose a folder")
    if out_dir.is_dir() and any(out_dir.iterdir()):
        if not force:
            raise SynthError(f"{out_dir} is not empty; choose another folder, or pass --force")
        if not (out_dir / "config.json").is_file():
            raise SynthError(f"{out_dir} is no checkpoint (no config.json): --force spares it")
    check_room(out_dir, n_bytes)


def check_gguf_file(path: Path, n_bytes: int, force: bool) -> None:
    """Raises a SynthError if the file `path` may not be written or its disk lacks room."""
    if path.suffix != ".gguf":
        raise SynthError(f"{path} must end in .gguf: with --format gguf, -o names a file")
    if path.is_dir():
        raise SynthError(f"{path} is a folder; choose a file name")
    if path.exists():
        if not force:
            raise SynthError(f"{path} exists; choose another name, or pass --force")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise SynthError(f"{path} is no GGUF file: --force spares it")
    check_room(path, n_bytes)


def check_room(destination: Path, n_bytes: int) -> None:
    """Raises a SynthError if the disk below `destination` has less than `n_bytes` free."""
    existing = next(p for p in (destination, *destination.parents) if p.exists())
    free, needed = shutil.disk_usage(existing).free, n_bytes + _MARGIN_BYTES
    if free < needed:
        raise SynthError(
            f"not enough room at {existing}: {format_bytes(needed)} needed, "
            f"{format_bytes(free)} free"
        )
