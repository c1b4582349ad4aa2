"""The embedded pair, a small target and its distilled draft; a mixture and a hybrid beside it.

All are package data. Models are named `pair:target`, `pair:draft`, `pair:moe` (experts) and
`pair:hybrid` (recurrent layers, with an MTP head) wherever a model folder is accepted,
`pair:target.gguf` and `pair:draft.gguf` wherever a GGUF file is, and the target's draft heads
`pair:mtp` and `pair:dflash` wherever a draft is. This module only knows paths: it
imports neither torch nor transformers.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

PAIR_PREFIX = "pair:"
GGUF_SUFFIX = ".gguf"
PAIR_NAMES = ("pair:target", "pair:draft", "pair:moe", "pair:hybrid")
PAIR_HEAD_NAMES = ("pair:mtp", "pair:dflash")
"""Draft heads of pair:target, trained by `specdec train-draft`."""
PAIR_GGUF_NAMES = ("pair:target.gguf", "pair:draft.gguf")
"""The same weights in F16; `python -m tests.helpers.pair_gguf` writes these files."""


def pair_path(name: str) -> Path:
    """Return the folder of an embedded model, or its GGUF file.

    Args:
        name: one of `PAIR_NAMES`, `PAIR_HEAD_NAMES` or `PAIR_GGUF_NAMES`.

    Raises:
        ValueError: the name is none of them.
        FileNotFoundError: the package was installed without its model files.
    """
    known = (*PAIR_NAMES, *PAIR_HEAD_NAMES, *PAIR_GGUF_NAMES)
    if name not in known:
        kinds = [item.removeprefix(PAIR_PREFIX) for item in known]
        near = get_close_matches(name.removeprefix(PAIR_PREFIX), kinds, n=1)
        hint = f"did you mean {PAIR_PREFIX}{near[0]}? Known: " if near else "known: "
        raise ValueError(f"unknown embedded model {name!r}; {hint}{', '.join(known)}")
    path = Path(__file__).resolve().parent / name.removeprefix(PAIR_PREFIX)
    if not (path if name in PAIR_GGUF_NAMES else path / "config.json").is_file():
        raise FileNotFoundError(
            f"the embedded model {name!r} is not at {path}; reinstall specdec, "
            "or train it with `python -m bench.train.train`"
        )
    return path
