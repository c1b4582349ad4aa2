"""The draft that -md auto takes: the target's own head, or a draft model on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from backends.heads.kinds import DFLASH, EAGLE3, head_kind, may_fit
from backends.heads.opened import has_mtp_head
from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.models.downloads import draft_to_download
from specdec.models.local_models import LocalModel, local_heads, local_models
from specdec.models.names import MTP_HEAD, resolve_model
from specdec.models.opened import read_vocabulary
from specdec.models.weight_files import weight_files
from specdec.pair import PAIR_PREFIX
from specdec.text.vocabulary import compare_vocabularies

logger = logging.getLogger(__name__)
_AUTO = "auto"
_LARGEST_SHARE = 0.25
"""Maximum size of a draft as a share of the target's bytes: usual pairs are 1B for 8B and 7B for
70B. A larger one takes memory that layers of the target would have."""


class AutoDraft(NamedTuple):
    """A choice of -md auto. name: None for n-grams alone."""

    name: str | None
    reason: str


def named_draft(
    target: str | Path, draft: str | Path | None, *, takes_heads: bool = True
) -> str | Path | None:
    """Return the draft's name as given; for "auto" that of `auto_draft`, and say why."""
    if draft != _AUTO:
        return draft
    choice = auto_draft(str(target), takes_heads=takes_heads)
    named = "n-grams draft" if choice.name is None else f"the draft is {choice.name}"
    logger.warning(f"{named}: {choice.reason}")
    return choice.name


def auto_draft(target: str, *, takes_heads: bool = True) -> AutoDraft:
    """Choose the draft of a target: a head on this machine (DFlash before EAGLE-3), or its own MTP
    head; else the largest model on this machine that has its vocabulary and at most a quarter of
    its bytes; else n-grams.

    A head fits its target better than another model does, and is read with it. DFlash needs one
    pass for a tree, and its trees bring the most tokens.

    takes_heads: whether the target runs on the CPU, where heads run.
    """
    path = resolve_model(target)
    heads = _heads_for(path) if takes_heads else {}
    if DFLASH in heads:
        return AutoDraft(heads[DFLASH], f"a DFlash head here that has the sizes of {target}")
    if takes_heads and has_mtp_head(path):
        return AutoDraft(MTP_HEAD, f"{target} has an MTP head of its own")
    if EAGLE3 in heads:
        return AutoDraft(heads[EAGLE3], f"an EAGLE-3 head here that has the sizes of {target}")
    n_bytes = sum(file.stat().st_size for file in weight_files(path))
    drafts = drafts_for(target, local_models())
    small = [draft for draft in drafts if draft.n_bytes <= _LARGEST_SHARE * n_bytes]
    if small:
        draft = max(small, key=lambda draft: draft.n_bytes)
        return AutoDraft(
            draft.name,
            f"{target} has no head to use, and this one ({format_bytes(draft.n_bytes)}) is the "
            f"largest of {len(small)} here with its vocabulary and at most a quarter of its size",
        )
    return AutoDraft(
        None,
        f"{target} has no head to use, and no model here has its vocabulary and at most a "
        f"quarter of its size; {draft_to_download(path)}",
    )


def _heads_for(target: Path) -> dict[str, str]:
    """Return the name of a head in files of its own for each kind that has one for a target."""
    names: dict[str, str] = {}
    for head in local_heads():
        path = resolve_model(head.name)
        kind = head_kind(path)
        if kind is not None and may_fit(path, target):
            names.setdefault(kind, head.name)
    return names


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
