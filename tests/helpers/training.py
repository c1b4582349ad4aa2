"""Texts, options and weights for tests of training."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.run_options import RunOptions
from specdec.training.options import TrainOptions

if TYPE_CHECKING:
    import torch

WORDS = "int char void static return if else for while struct size_t const * ; { } ( ) = +".split()


def save_text(folder: Path, n_files: int = 12, n_words: int = 120, seed: int = 0) -> Path:
    """Write files of random C words."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n_files):
        text = " ".join(rng.choices(WORDS, k=n_words))
        (folder / f"{number}.c").write_text(text)
    return folder


def train_options(target: str | Path, out: Path, **changes: Any) -> TrainOptions:
    """Return options of a training of some seconds, without a limit of time."""
    values = {
        "length": 64,
        "minutes": 1e6,
        "epochs": 6.0,
        "generate": 0.0,
        "learning_rate": 0.02,
        **changes,
    }
    text = values.get("text")
    values["text"] = (text,) if isinstance(text, Path) else text or ()
    run = RunOptions(str(target), memory_budget="2GiB", threads=1)
    return TrainOptions(run, out, **values)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
