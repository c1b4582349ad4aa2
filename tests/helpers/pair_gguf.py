"""A checkpoint as GGUF in F16, and the files of the embedded pair.

`python -m tests.helpers.pair_gguf` writes the latter, after the pair was trained anew.
"""

from __future__ import annotations

from pathlib import Path

from bench.synth.gguf import grow_gguf
from bench.synth.source import SourceModel
from specdec.pair import GGUF_SUFFIX, PAIR_GGUF_NAMES, PAIR_PREFIX, pair_path


def save_gguf(folder: Path, path: Path, name: str) -> Path:
    """Write a checkpoint as GGUF: matrices in F16, norms and routers in F32."""
    shape = SourceModel(folder).shape
    return grow_gguf(folder, path, shape, dtype="f16", source_name=name, force=True).path


def write_pair(destination: Path) -> list[Path]:
    """Write the GGUF files of the embedded pair into a folder."""
    made = []
    for name in PAIR_GGUF_NAMES:
        model, path = name.removesuffix(GGUF_SUFFIX), destination / name.removeprefix(PAIR_PREFIX)
        made.append(save_gguf(pair_path(model), path, model))
    return made


if __name__ == "__main__":
    print(*write_pair(pair_path("pair:target").parent), sep="\n")
