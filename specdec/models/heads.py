"""Draft heads in files of their own, by name: refused as a target, and compared with one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.contract.backend import UnsupportedModel
from backends.contract.source import BackendOptions, ModelSource
from backends.heads.kinds import MTP, NAMES, head_kind
from backends.heads.opened import mtp_source, open_head
from specdec.models.names import has_own_files, resolve_model


def refuse_head(path: Path) -> None:
    """Raise UnsupportedModel for a draft head's folder in the place of a model.

    path: result of `resolve_model`. GGUF files are refused by `backends.gguf.kinds`, which has read
    their header.
    """
    kind = head_kind(path) if path.is_dir() else None
    if kind is not None:
        raise UnsupportedModel(
            f"{path} is {NAMES[kind]}, a draft head, which runs only beside its target: "
            "name the target with -m, and this head with -md (--draft-model)"
        )


@dataclass(frozen=True)
class HeadFit:
    """A draft head that has the shapes and the vocabulary of its target."""

    target: str
    head: str
    kind: str
    """A key of `backends.heads.kinds.NAMES`."""
    n_target_tokens: int
    n_layers: int
    """Layers of the head."""

    @property
    def is_targets_own(self) -> bool:
        """Whether the head is among the target's own weights."""
        return not has_own_files(self.head)

    def lines(self) -> list[str]:
        whose = ", the target's own" if self.is_targets_own else ""
        note = (
            "note       a head's files do not say which weights it was trained for: if few of its "
            "tokens are accepted, it was made for another model"
        )
        return [
            f"target     {self.n_target_tokens} tokens",
            f"draft      {NAMES[self.kind]}{whose}, layers: {self.n_layers}",
            *(() if self.is_targets_own else (note,)),
            f"ok: the head fits; use it with -m {self.target} -md {self.head}",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "compatible": True,
            "problem": None,
            "head": self.kind,
            "target_tokens": self.n_target_tokens,
            "head_layers": self.n_layers,
        }


def compare_head(target: ModelSource, target_name: str, head_name: str) -> HeadFit:
    """Compare an opened target with a draft head of one of `backends.heads.kinds.NAMES`; with its
    own for the name MTP_HEAD.

    Raises UnsupportedModel if it does not fit (another hidden size, vocabulary or family), or the
    target has no head.
    """
    if not has_own_files(head_name):
        kind: str | None = MTP
        source: ModelSource | None = mtp_source(target, BackendOptions())
    else:
        path = resolve_model(head_name)
        kind, source = head_kind(path), open_head(path, target, BackendOptions())
    assert kind is not None, "the caller asked `head_kind`"
    assert source is not None
    n_tokens, n_layers = target.vocab_size, len(source.layers)
    return HeadFit(target_name, head_name, kind, n_tokens, n_layers)
