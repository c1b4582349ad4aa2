"""Draft models on this machine that fit a target, and the choice among them."""

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
"""Maximum size of a draft as a share of the target's bytes: usual pairs are 1B for 8B and 7B for
70B. A larger one takes memory that layers of the target would have."""


def named_draft(target: str | Path, draft: str | Path | None) -> str | Path | None:
    """Return the draft's name as given; for "auto" the name of `best_draft`."""
    if draft != _AUTO:
        return draft
    result = best_draft(str(target))
    logger.warning(f"the draft model is {result}")
    return result


def best_draft(target: str) -> str:
    """Return the name of the largest model on this machine that fits the target as a draft and has
    at most a quarter of its bytes.

    Raises ModelNotFound where there is none.
    """
    n_bytes = sum(path.stat().st_size for path in weight_files(resolve_model(target)))
    drafts = drafts_for(target, local_models())
    small = [draft for draft in drafts if draft.n_bytes <= _LARGEST_SHARE * n_bytes]
    if not small:
        raise ModelNotFound(
            f"no model on this machine has the vocabulary of {target} and at most a quarter of "
            f"its bytes ({len(drafts)} have its vocabulary): `specdec models --fits {target}` "
            "lists them; name a draft, or leave -md out"
        )
    return max(small, key=lambda draft: draft.n_bytes).name


def drafts_for(target: str, models: Iterable[LocalModel]) -> list[LocalModel]:
    """Return the other models, and the embedded draft, that have the target's vocabulary; log those
    that cannot be read."""
    vocabulary, path, fitting = read_vocabulary(target), resolve_model(target), []
    for model in (_embedded(), *models):
        try:
            is_other = resolve_model(model.name) != path
            if (
                is_other
                and compare_vocabularies(vocabulary, read_vocabulary(model.name)).problem is None
            ):
                fitting.append(model)
        except SpecdecError as error:
            logger.warning(f"{model.name} is left out: {error}")
    return fitting


def _embedded() -> LocalModel:
    """Return the embedded draft: it fits the embedded target and models grown from it."""
    name = f"{PAIR_PREFIX}draft"
    files = weight_files(resolve_model(name))
    n_bytes = sum(path.stat().st_size for path in files)
    return LocalModel(name, "safetensors", n_bytes, "specdec")
