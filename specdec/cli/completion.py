"""Completion of a model's name in a shell."""

from __future__ import annotations

from specdec.pair import PAIR_HEAD_NAMES, PAIR_NAMES

_DRAFTS = ("auto", "mtp", *PAIR_HEAD_NAMES)


def complete_model(incomplete: str, *, is_draft: bool) -> list[str]:
    """Return names on this machine that begin so; files are left to the shell."""
    from specdec.models.local_models import local_models

    names = [*PAIR_NAMES, *(_DRAFTS if is_draft else ()), *(item.name for item in local_models())]
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
