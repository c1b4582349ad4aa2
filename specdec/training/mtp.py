"""An MTP head in training (DeepSeek-V3, 2024, section 2.2, with one layer that is run again)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DynamicCache

from backends.checkpoint.skeleton import decoder_layers
from backends.contract.backend import LAST_HIDDEN_STATE
from backends.heads.mtp import (
    JoinedEmbedding,
    load_mtp_folder,
    load_mtp_head,
    mtp_skeleton,
    with_own_sizes,
)
from backends.heads.mtp_files import MTP_CLASS, mtp_names, mtp_tensors, renamed
from specdec.training.head import initialise, load_values
from specdec.training.options import TrainError
from specdec.training.repeated import RepeatedHead, Step, step_positions


class MtpDraft(RepeatedHead):
    """An MTP head: that of a folder, the target's own, or a new one whose layer begins as a no-op.

    Args:
        directory, vocab_size: see TargetHead.
        folder: of a head to train further.
        intermediate_size: neurons of a new head; None: as the target's layers.

    Raises TrainError, UnsupportedModel.
    """

    hidden_layers = (LAST_HIDDEN_STATE,)

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        *,
        folder: Path | None = None,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__(directory, vocab_size)
        target = self._target
        if target.experts and any(target.experts):
            raise TrainError(
                f"{directory} is a mixture of experts, for which no MTP head can be trained yet: "
                "train another kind of head, or align a draft model with --from"
            )
        self.is_new = folder is None and not mtp_tensors(target.index, len(target.layers))
        sizes = {} if intermediate_size is None else {"intermediate_size": intermediate_size}
        self._config = with_own_sizes(target.config, sizes)
        if folder is not None:
            stored = load_mtp_folder(target, folder)
            self._config = stored.config
        elif not self.is_new:
            stored = load_mtp_head(target, directory)
        self._model = self.module = mtp_skeleton(target, self._config)
        self._model.set_attn_implementation("sdpa" if self._model._supports_sdpa else "eager")
        if self.is_new:
            initialise(self._model, decoder_layers(self._model)[1])
        else:
            load_values(self._model, stored, folder or directory)
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, JoinedEmbedding), "the skeleton has one"
        self._joined = embedding

    def _run(
        self, token_ids: torch.Tensor, states: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> Step:
        joined = self._joined
        joined.tokens, joined.hidden_states = self._embedding, states
        try:
            output = self._model.get_decoder()(
                input_ids=token_ids,
                attention_mask=mask,
                position_ids=step_positions(token_ids, cache),
                past_key_values=cache,
            )
        finally:
            joined.hidden_states = joined.tokens = None  # no parameters of the head
        return Step(output.last_hidden_state, output.last_hidden_state)

    def save(self, folder: Path) -> None:
        starts = {new: old for old, new in mtp_names(decoder_layers(self._model)[0]).items()}
        tensors = {}
        for name, parameter in self._model.named_parameters():
            stored = renamed(name, starts)
            assert stored is not None, f"{name} is no part of an MTP head"
            tensors[stored] = parameter.detach().to("cpu", self.dtype).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {**self._config.to_dict(), "architectures": [MTP_CLASS]}
        config.pop("_name_or_path", None)  # a folder of this machine
        text = json.dumps(config, indent=2, default=str) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")
