"""Which of the models on this machine may draft for a target, and which of them to take."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from offload.errors import SpecdecError
from specdec.models.local_models import LocalModel, local_models
from specdec.models.names import ModelNotFound, resolve_model
from specdec.models.opened import read_vocabulary
from specdec.models.weight_files import weight_files
from specdec.pair import PAIR_PREFIX
from specdec.text.vocabulary import compare_vocabularies

logger = logging.getLogger(__name__)
_AUTO = "auto"
_LARGEST_SHARE = 0.25
"""Of the target's bytes, that a draft has: usual pairs are 1B for 8B and 7B for 70B. A larger one
takes memory that layers of the target would have."""


def named_draft(target: str | Path, draft: str | Path | None) -> str | Path | None:
    """The draft as it was named; for "auto" the name of `best_draft`."""
    if draft != _AUTO:
        return draft
    result = best_draft(str(target))
    logger.warning(f"the draft model is {result}")
    return result


def best_draft(target: str) -> str:
    """The name of the largest model on this machine that may draft for this one and has at most a
    quarter of its bytes.

    Raises ModelNotFound where there is none.
    """
    n_bytes = sum(path.stat().st_size for path in weight_files(resolve_model(target)))
    result = drafts_for(target, local_models())
    small = [item for item in result if item.n_bytes <= _LARGEST_SHARE * n_bytes]
    if not small:
        raise ModelNotFound(
            f"no model on this machine has the vocabulary of {target} and at most a quarter of "
            f"its bytes ({len(result)} have its vocabulary): `specdec models --fits {target}` lists "
            "them; name a draft, or leave -md out"
        )
    return max(small, key=lambda item: item.n_bytes).name


def drafts_for(target: str, models: Iterable[LocalModel]) -> list[LocalModel]:
    """Those other models, and of the embedded pair, that have the target's vocabulary; what cannot
    be read is logged."""
    requested, path, fitting = read_vocabulary(target), resolve_model(target), []
    for item in (_embedded(), *models):
        try:
            is_other = resolve_model(item.name) != path
            if (
                is_other
                and compare_vocabularies(requested, read_vocabulary(item.name)).problem is None
            ):
                fitting.append(item)
        except SpecdecError as error:
            logger.warning(f"{item.name} is left out: {error}")
    return fitting


def _embedded() -> LocalModel:
    """The draft that specdec brings: it fits the embedded target, and what was grown from it."""
    name = f"{PAIR_PREFIX}draft"
    files = weight_files(resolve_model(name))
    n_bytes = sum(path.stat().st_size for path in files)
    return LocalModel(name, "safetensors", n_bytes, "specdec")
