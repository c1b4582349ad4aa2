"""The embedded pair, a small target and its distilled draft, and a mixture of experts beside it.

All are package data. Models are named `pair:target`, `pair:draft` and `pair:moe` wherever a model
folder is accepted. This module only knows paths: it imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

PAIR_PREFIX = "pair:"
PAIR_NAMES = ("pair:target", "pair:draft", "pair:moe")
GGUF_SUFFIX = ".gguf"
"""Of a GGUF file, and of the name of an embedded model as one."""


def pair_path(name: str) -> Path:
    """Returns the folder of an embedded model.

    Args:
        name: one of `PAIR_NAMES`.

    Raises:
        ValueError: the name is not one of `PAIR_NAMES`.
        FileNotFoundError: the package was installed without its model files.
    """
    if name not in PAIR_NAMES:
        raise ValueError(f"unknown embedded model {name!r}; known: {', '.join(PAIR_NAMES)}")
    folder = Path(__file__).resolve().parent / name.removeprefix(PAIR_PREFIX)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded model {name!r} is not in {folder}; reinstall specdec, "
            "or train it with `python -m bench.train.train`"
        )
    return folder
