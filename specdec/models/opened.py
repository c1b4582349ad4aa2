"""The models of a run before their weights."""

from __future__ import annotations

from dataclasses import dataclass

from backends.contract.source import ModelSource
from specdec.models.formats import OpenedModel


@dataclass(frozen=True)
class OpenedPair:
    """The models of a run, without weights."""

    target: OpenedModel
    draft: OpenedModel | None

    @property
    def sources(self) -> tuple[ModelSource, ModelSource | None]:
        return self.target.source, None if self.draft is None else self.draft.source
