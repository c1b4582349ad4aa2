"""A draft model of its own: a small causal language model, fine-tuned."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from backends.contract.backend import one_line
from specdec.models.opened import is_gguf
from specdec.packing.source import files_beside
from specdec.training.data import Batch
from specdec.training.loss import top_k_loss
from specdec.training.options import TrainError
from specdec.training.trainable import Trainable, in_bf16, likeliest

_OTHER_WEIGHTS = ("README.md", "model.safetensors.index.json")
"""Files that describe the original's weights."""
_UNLIMITED = 2**31


class CausalDraft(Trainable):
    """A checkpoint for transformers.

    Args:
        vocab_size: tokens of the target; later ones are never proposed.

    Raises TrainError for a model that cannot be trained.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        check_trainable(directory)
        self._directory, self._vocab_size = directory, vocab_size
        self._beside = files_beside(directory)
        try:
            with _without_bars():
                model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
        except Exception as error:  # whatever the library raises for a model that it cannot load
            raise TrainError(f"{directory} cannot be loaded: {one_line(error)}") from error
        self.dtype = model.dtype
        self.module = self._model = model.float().eval()  # without dropout
        config = model.config.get_text_config()
        self.hidden_size = int(config.hidden_size)
        self.max_length = int(getattr(config, "max_position_embeddings", _UNLIMITED))

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self._logits(batch)[batch.windows, batch.positions]
        return top_k_loss(batch.targets, logits)

    def agreements(self, batch: Batch, depth: int) -> torch.Tensor:
        is_equal = self._logits(batch).argmax(-1) == likeliest(batch)
        length = is_equal.shape[1]
        result = torch.zeros((depth, *is_equal.shape), dtype=torch.bool, device=is_equal.device)
        for step in range(min(depth, length)):  # the text is given: a later position, or this one
            result[step, :, : length - step] = is_equal[:, step:]
        return result

    def _logits(self, batch: Batch) -> torch.Tensor:
        with in_bf16(batch.token_ids.device):
            output = self._model(input_ids=batch.token_ids, use_cache=False)
        return output.logits[..., : self._vocab_size]

    def save(self, folder: Path) -> None:
        with _without_bars():
            self._model.to(self.dtype).save_pretrained(folder)
        for name, path in self._beside.items():
            if name not in _OTHER_WEIGHTS:
                shutil.copyfile(path, folder / name)


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide transformers' progress bars."""
    is_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            transformers_logging.enable_progress_bar()


def check_trainable(directory: Path) -> None:
    """Raise TrainError for a draft whose weights are stored in too few bits to be trained."""
    if is_gguf(directory):
        raise TrainError(
            f"{directory} is a GGUF file: train the safetensors checkpoint that it was made from"
        )
    from backends.checkpoint.config import load_config
    from backends.checkpoint.quantised import quantisation_of
    from offload.formats.checkpoint import WeightIndex

    index = WeightIndex.from_directory(directory)
    is_packed = any(record.scheme for record in index.values())
    if is_packed or quantisation_of(load_config(directory)) is not None:
        raise TrainError(
            f"{directory} is {'packed' if is_packed else 'quantised'}: train the plain checkpoint"
        )
