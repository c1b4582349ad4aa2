"""Drafts that can be trained, by kind."""

from __future__ import annotations

from pathlib import Path

from specdec.models.names import resolve_model
from specdec.models.opened import compare_models, is_gguf
from specdec.training.errors import TrainError
from specdec.training.options import MTP, TrainOptions
from specdec.training.trainable import Trainable


def check_draft(options: TrainOptions, target: Path) -> None:
    """Raise SpecdecError for a draft that cannot be trained for this target, by headers alone."""
    if options.draft is not None:
        from specdec.training.causal import check_trainable

        directory = resolve_model(options.draft)
        check_trainable(directory)
        if directory == target:
            raise TrainError(
                f"{options.draft} is the target itself: name a smaller model to align with it"
            )
        compare_models(target, directory).require_compatible()
    elif is_gguf(target):
        raise TrainError(
            f"{target} is a GGUF file, and a head is trained with a checkpoint's embedding and "
            "output head: name the safetensors checkpoint, or train a model with --from"
        )


def make_trainable(options: TrainOptions, target: Path, vocab_size: int) -> Trainable:
    """Load the draft, or make a new one. Raises SpecdecError."""
    if options.draft is not None:
        from specdec.training.causal import CausalDraft

        return CausalDraft(resolve_model(options.draft), vocab_size)
    assert options.kind == MTP, "the options know the kinds"
    from specdec.training.mtp import MtpDraft

    return MtpDraft(target, vocab_size)
