"""The plain form of a checkpoint that `specdec-bench synth` quantised: bf16, as its config says.

    python -m bench.synth.dequantised DIR -o DIR

For programs that cannot read the quantised one, and to compare texts with: its weights are the
numbers that the quantised ones stand for, by the plain formulas of bench.synth.layouts.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bench.synth.files import check_folder, write_json
from bench.synth.layouts import LAYOUTS, Scheme
from bench.synth.shapes import SynthError
from bench.synth.source import read_json
from offload.formats.checkpoint import WeightIndex
from offload.storage.unfinished import unfinished
from specdec.cli.errors import run_app

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NOT_COPIED = (".safetensors", ".safetensors.index.json", "README.md")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def dequantise(folder: Path, out: Path) -> None:
    """Writes the plain form of `folder` to `out`, a file for each layer; one is held in memory.

    Matrices are stored in the number format that config.json names, the rest as it is.

    Raises:
        SynthError, CheckpointError: `folder` is not quantised as `synth` does, `out` is not empty,
            the disk lacks room.
    """
    config = read_json(folder / "config.json")
    scheme = _scheme_of(config.pop("quantization_config", None), folder)
    dtype = _DTYPES.get(str(config.get("dtype")))
    if dtype is None:
        raise SynthError(
            f"{folder}/config.json: dtype is {config.get('dtype')!r}, must be one of "
            f"{', '.join(_DTYPES)}"
        )
    files = {name: record.path for name, record in WeightIndex.from_directory(folder).items()}
    stored = _stored(files, scheme)
    by_layer: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        found = _LAYER.search(name)
        by_layer[f"layer-{found[1]}" if found else "outer"].append(name)
    # Four bits become sixteen, at most.
    check_folder(out, folder, 4 * sum(path.stat().st_size for path in set(files.values())), False)
    weight_map: dict[str, str] = {}
    n_bytes = 0
    with unfinished(out) as partial:
        partial.mkdir(parents=True)
        for layer, names in by_layer.items():
            tensors = {name: _tensor(scheme, stored[name], files, dtype) for name in names}
            _save(tensors, partial / f"{layer}.safetensors", out)
            weight_map |= dict.fromkeys(names, f"{layer}.safetensors")
            n_bytes += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
        write_json(partial / "model.safetensors.index.json", index)
        for path in folder.iterdir():
            if path.is_file() and not path.name.endswith(_NOT_COPIED):
                shutil.copyfile(path, partial / path.name)
        write_json(partial / "config.json", config)
        partial.rename(out)


def _scheme_of(settings: object, folder: Path) -> Scheme:
    for layout in LAYOUTS.values():
        if layout.scheme is not None and layout.scheme.settings == settings:
            return layout.scheme
    raise SynthError(f"{folder} is not quantised as specdec-bench synth does")


def _stored(files: dict[str, Path], scheme: Scheme) -> dict[str, list[str]]:
    """The names of what is stored of each tensor; of one that is not quantised its own."""
    stored = {}
    for name in files:
        module, _, suffix = name.rpartition(".")
        parts = [part.name for part in scheme.stored(module, 0, 0)]
        if all(part in files for part in parts):
            stored[f"{module}.weight"] = parts
        elif suffix == "weight":
            stored[name] = [name]
    left = set(files).difference(*stored.values())
    if left:
        raise SynthError(f"{min(left)} lacks what goes with it: grow the checkpoint again")
    return stored


def _tensor(
    scheme: Scheme, parts: list[str], files: dict[str, Path], dtype: torch.dtype
) -> torch.Tensor:
    try:
        loaded = []
        for name in parts:
            with safe_open(files[name], framework="pt") as file:
                loaded.append(file.get_tensor(name))
        tensor = scheme.dequantise(loaded, dtype) if len(loaded) > 1 else loaded[0]
    # Of torch, where shapes or number formats do not go together.
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:
        raise SynthError(f"{' and '.join(parts)} cannot be dequantised: {error}") from error
    if tensor.dtype not in _DTYPES.values():
        raise SynthError(f"{parts[0]} lacks what goes with it: grow the checkpoint again")
    return tensor


def _save(tensors: dict[str, torch.Tensor], path: Path, out: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # so it tells of a full disk, too
        raise SynthError(f"cannot write {out}: {error}") from error


@app.command()
def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The quantised checkpoint.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder to write.")],
) -> None:
    """Write the plain form of a quantised checkpoint that synth grew."""
    dequantise(folder.expanduser(), out.expanduser().absolute())


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.synth.dequantised", sys.argv[1:]))
