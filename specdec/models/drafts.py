"""Drafts that a target could have here: its own head, heads and models on this machine, n-grams."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from backends.heads.kinds import MTP, NAMES, head_kind, may_fit
from backends.heads.opened import has_mtp_head
from offload.errors import SpecdecError
from offload.units import format_bytes
from specdec.models.downloads import draft_to_download
from specdec.models.eval_results import EvalResults, read_eval_results
from specdec.models.local_models import LocalModel, local_heads, local_models
from specdec.models.names import MTP_HEAD, resolve_model
from specdec.models.opened import read_vocabulary
from specdec.models.weight_files import weight_files, weights_fingerprint
from specdec.pair import PAIR_HEAD_NAMES, PAIR_PREFIX
from specdec.text.vocabulary import compare_vocabularies

logger = logging.getLogger(__name__)
AUTO_DRAFT = "auto"
MODEL, NGRAM = "model", "ngram"
"""Kinds of candidates that are no heads."""
_LARGEST_SHARE = 0.25
"""Maximum size of a draft as a share of the target's bytes: usual pairs are 1B for 8B and 7B for
70B. A larger one takes memory that layers of the target would have."""
_MAX_MODELS = 3
"""Models, the largest, that are compared: planning with each takes time."""
_NAMED = 5
"""Models that a message names."""


class DraftCandidate(NamedTuple):
    """A draft that -md auto may take.

    name: value of -md; None for n-grams alone.
    kind: MODEL, NGRAM, or a key of `backends.heads.kinds.NAMES`.
    description: reason that it is a candidate, for the user.
    results: measured with this target when it was trained.
    """

    name: str | None
    kind: str
    description: str
    results: EvalResults | None = None


def draft_candidates(target: str, *, takes_heads: bool = True) -> list[DraftCandidate]:
    """Return the drafts that a target could have, n-grams alone first.

    takes_heads: whether the target runs on the CPU, where heads run.
    """
    path = resolve_model(target)
    result = [*_heads_for(target, path)] if takes_heads else []
    result += _models_for(target, path)
    lacking = "" if result else f"no head or small model is here; {draft_to_download(path)}"
    return [DraftCandidate(None, NGRAM, lacking), *result]


def _heads_for(target: str, path: Path) -> Iterator[DraftCandidate]:
    """Yield the target's own head, and one head of each kind among files of their own: the one with
    the most tokens per pass of those evaluated with this target, or else the first."""
    if has_mtp_head(path):
        yield DraftCandidate(MTP_HEAD, MTP, f"{target} has an MTP head of its own")
    fingerprint = cache(lambda: weights_fingerprint(path))
    by_kind: dict[str, DraftCandidate] = {}
    for head in local_heads():
        head_path = resolve_model(head.name)
        kind = head_kind(head_path)
        # MTP heads in folders run beside checkpoints alone.
        if kind is None or not may_fit(head_path, path) or (kind == MTP and path.is_file()):
            continue
        results = read_eval_results(head_path)
        if results is not None and results.target_fingerprint != fingerprint():
            results = None
        if kind not in by_kind or _is_better(results, by_kind[kind].results):
            reason = f"{NAMES[kind]} here that has the sizes of {target}"
            by_kind[kind] = DraftCandidate(head.name, kind, reason, results)
    yield from by_kind.values()
    for name in PAIR_HEAD_NAMES:
        head_path = resolve_model(name)
        kind, results = head_kind(head_path), read_eval_results(head_path)
        if kind is None or results is None or not may_fit(head_path, path):
            continue
        if results.target_fingerprint == fingerprint():
            yield DraftCandidate(name, kind, f"{NAMES[kind]} made for {target}", results)


def _is_better(results: EvalResults | None, than: EvalResults | None) -> bool:
    if results is None or than is None:
        return results is not None
    return results.tokens_per_pass > than.tokens_per_pass


def _models_for(target: str, path: Path) -> list[DraftCandidate]:
    """Return the largest models here with the target's vocabulary and at most a quarter of its
    bytes."""
    n_bytes = sum(file.stat().st_size for file in weight_files(path))
    drafts = drafts_for(target, local_models())
    small = [draft for draft in drafts if draft.n_bytes <= _LARGEST_SHARE * n_bytes]
    small.sort(key=lambda draft: draft.n_bytes, reverse=True)
    return [_model(draft, path) for draft in small[:_MAX_MODELS]]


def _model(draft: LocalModel, target: Path) -> DraftCandidate:
    results = read_eval_results(resolve_model(draft.name))
    if results is not None and results.target_fingerprint != weights_fingerprint(target):
        results = None
    size = format_bytes(draft.n_bytes)
    return DraftCandidate(draft.name, MODEL, f"a model of its vocabulary ({size})", results)


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


def no_draft_for(target: str, models: Iterable[LocalModel]) -> str:
    """Return the line for a target whose vocabulary none of these models has, with its remedy."""
    names = [item.name for item in (_embedded(), *models) if item.name != target]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"no model here has the vocabulary of {target} (compared: {', '.join(names[:_NAMED])}"
        f"{more}): {draft_to_download(resolve_model(target))}"
    )


def _embedded() -> LocalModel:
    """Return the embedded draft: it fits the embedded target and models grown from it."""
    name = f"{PAIR_PREFIX}draft"
    files = weight_files(resolve_model(name))
    n_bytes = sum(path.stat().st_size for path in files)
    return LocalModel(name, "safetensors", n_bytes, "specdec")
