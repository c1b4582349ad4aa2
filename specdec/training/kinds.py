"""Drafts that can be trained, by kind."""

from __future__ import annotations

from pathlib import Path

from backends.heads.kinds import ASSISTANT, DFLASH, EAGLE3, MTP, NAMES, head_kind, is_dflash2
from specdec.models.names import resolve_model
from specdec.models.opened import compare_models, is_gguf
from specdec.training.options import TrainError, TrainOptions
from specdec.training.trainable import Trainable


def check_draft(options: TrainOptions, target: Path) -> None:
    """Raise SpecdecError for a draft that cannot be trained for this target, by headers alone."""
    kind, folder = _kind_of(options)
    if kind is not None and is_gguf(target):
        raise TrainError(
            f"{target} is a GGUF file, and a head is trained with a checkpoint's embedding and "
            "output head: name the safetensors checkpoint, or train a model with --from"
        )
    if kind == EAGLE3 and folder is not None:
        raise TrainError(
            f"{options.draft} is {NAMES[EAGLE3]}, which is not trained further: train a new one "
            f"(--kind {EAGLE3})"
        )
    if kind == ASSISTANT:
        raise TrainError(
            f"{options.draft} is {NAMES[ASSISTANT]}, which is not trained: name a draft model"
        )
    if kind == DFLASH and folder is not None and folder.is_file():
        raise TrainError(
            f"{options.draft} is a GGUF file, and heads are trained in safetensors: name the "
            f"head's folder, or train a new one (--kind {DFLASH})"
        )
    if kind == DFLASH and folder is not None and is_dflash2(folder):
        raise TrainError(
            f"{options.draft} is a DFlash 2 head, which is not trained further: train a new head "
            f"(--kind {DFLASH})"
        )
    if kind is None:
        _check_model(options, target)


def _check_model(options: TrainOptions, target: Path) -> None:
    from specdec.training.causal import check_trainable

    assert options.draft is not None, "it is no head"
    directory = resolve_model(options.draft)
    check_trainable(directory)
    if directory == target:
        raise TrainError(
            f"{options.draft} is the target itself: name a smaller model to align with it"
        )
    compare_models(target, directory).require_compatible()


def make_trainable(options: TrainOptions, target: Path, vocab_size: int) -> Trainable:
    """Load the draft, or make a new one. Raises SpecdecError."""
    kind, folder = _kind_of(options)
    size = options.intermediate_size
    if kind == MTP:
        from specdec.training.mtp import MtpDraft

        return MtpDraft(target, vocab_size, folder=folder, intermediate_size=size)
    if kind == EAGLE3:
        from specdec.training.eagle3 import Eagle3Draft

        return Eagle3Draft(target, vocab_size, intermediate_size=size)
    if kind == DFLASH:
        from specdec.training.dflash import DFlashDraft

        return DFlashDraft(
            target,
            vocab_size,
            folder=folder,
            num_layers=options.head_layers,
            intermediate_size=size,
        )
    from specdec.training.causal import CausalDraft

    assert options.draft is not None, "the options know the kinds"
    return CausalDraft(resolve_model(options.draft), vocab_size)


def _kind_of(options: TrainOptions) -> tuple[str | None, Path | None]:
    """Return the kind of head, or None for a model, and the folder of one to train further."""
    if options.draft is None:
        return options.kind, None
    path = resolve_model(options.draft)
    kind = head_kind(path)
    return kind, (None if kind is None else path)
