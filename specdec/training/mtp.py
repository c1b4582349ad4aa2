"""An MTP head in training: several steps of the head, as drafting runs it repeatedly.

Row i of step s has the head's input for token i + s, and predicts the token after that:

    target           h0  h1  h2  h3         hidden states after tokens t0, t1, ...
    step 1           t1  t2  t3  t4         with h0, h1, ...
    step 2           t2  t3  t4  t5         with the outputs of step 1

(DeepSeek-V3, 2024, section 2.2, with one layer that is run again.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from backends.checkpoint.records import BoundTensor
from backends.checkpoint.skeleton import decoder_layers
from backends.contract.backend import LAST_HIDDEN_STATE
from backends.heads.mtp import JoinedEmbedding, load_mtp_head, mtp_skeleton
from backends.heads.mtp_files import MTP_CLASS, mtp_names, renamed
from backends.heads.names import mtp_tensors
from backends.hf.model import HfModel, load_hf_model
from offload.formats.tensors import TensorRecord
from specdec.training.data import Batch
from specdec.training.errors import TrainError
from specdec.training.loss import TopKTargets
from specdec.training.precision import in_bf16
from specdec.training.trainable import Trainable, likeliest, rows_loss

MTP_STEPS = 3
"""Tokens ahead that the head is trained for."""
STEP_WEIGHT = 0.6
"""Weight of a step's loss, in multiples of the one before: later tokens are drafted less often."""
_SCALES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "logits_mup_width_multiplier",
)
"""Fields of configs whose output head is more than a product."""


class MtpDraft(Trainable):
    """The MTP head of a checkpoint: its own, or a new one whose layer begins as a no-op.

    Args:
        directory: the target's checkpoint, of which embedding and output head are read.
        vocab_size: tokens of the target; later ones are never proposed.

    Raises TrainError, UnsupportedModel.
    """

    hidden_layers: ClassVar[tuple[int, ...]] = (LAST_HIDDEN_STATE,)
    first_position = 1  # the first token has no hidden state before it

    def __init__(self, directory: Path, vocab_size: int) -> None:
        target = load_hf_model(directory)
        _check_family(target, directory)
        self._vocab_size, self._config = vocab_size, target.config
        self.dtype, self.max_length = target.dtype, target.max_context
        self.hidden_size = int(target.config.hidden_size)
        self.module = self._model = mtp_skeleton(target)
        self._model.set_attn_implementation("sdpa" if self._model._supports_sdpa else "eager")
        self.is_new = not mtp_tensors(target.index, len(target.layers))
        if self.is_new:
            _initialise(self._model)
        else:
            _load_own(self._model, load_mtp_head(target, directory), directory)
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, JoinedEmbedding), "the skeleton has one"
        self._embedding = embedding
        output = target.model.get_output_embeddings()
        self._frozen = nn.ModuleList(
            _frozen(module, target, directory)
            for module in (target.model.get_input_embeddings(), output)
        )

    @property
    def frozen_bytes(self) -> int:
        return sum(4 * parameter.numel() for parameter in self._frozen.parameters())

    def to(self, device: torch.device) -> None:
        super().to(device)
        self._frozen.to(device)

    def loss(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=batch.token_ids.device)
        with in_bf16(batch.token_ids.device):
            for step, states in enumerate(self._steps(batch, MTP_STEPS), start=1):
                is_reached = batch.positions >= step
                windows = batch.windows[is_reached]
                rows = states[windows, batch.positions[is_reached] - step]
                targets = TopKTargets(*(column[is_reached] for column in batch.targets))
                loss = rows_loss(rows, self._frozen[1], targets, self._vocab_size)
                total = total + STEP_WEIGHT**step * loss
        return total

    def agreements(self, batch: Batch, depth: int) -> torch.Tensor:
        expected = likeliest(batch)
        length = expected.shape[1]
        result = torch.zeros((depth, *expected.shape), dtype=torch.bool, device=expected.device)
        with in_bf16(batch.token_ids.device):
            steps = self._steps(batch, min(depth, length - 1))
            for step, states in enumerate(steps, start=1):
                tokens = self._frozen[1](states)[..., : self._vocab_size].argmax(-1)
                agrees = tokens[:, : length - step] == expected[:, step:]
                result[step - 1, :, 1 : 1 + agrees.shape[1]] = agrees
        return result

    def _steps(self, batch: Batch, count: int) -> Iterator[torch.Tensor]:
        """Yield the head's outputs [batch_size, length, hidden] of each step."""
        assert batch.hidden_states is not None, "the traces of a head have hidden states"
        states = batch.hidden_states.float()
        self._embedding.tokens = self._frozen[0]
        try:
            for step in range(1, count + 1):
                self._embedding.hidden_states = states
                # The last rows have tokens of the beginning: no distribution is known after them.
                token_ids = batch.token_ids.roll(-step, dims=1)
                decoder = self._model.get_decoder()
                states = decoder(input_ids=token_ids, use_cache=False).last_hidden_state
                yield states
        finally:
            self._embedding.hidden_states = self._embedding.tokens = None

    def save(self, folder: Path) -> None:
        starts = {new: old for old, new in mtp_names(decoder_layers(self._model)[0]).items()}
        tensors = {}
        for name, parameter in self._model.named_parameters():
            stored = renamed(name, starts)
            assert stored is not None, f"{name} is no part of an MTP head"
            tensors[stored] = parameter.detach().to("cpu", self.dtype).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {**self._config.to_dict(), "architectures": [MTP_CLASS]}
        text = json.dumps(config, indent=2, default=str) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")


def _check_family(target: HfModel, directory: Path) -> None:
    config = target.config
    scale = next((name for name in _SCALES if getattr(config, name, None) not in (None, 1.0)), None)
    problem = "is a mixture of experts" if target.experts and any(target.experts) else ""
    problem = f"scales its logits ({scale})" if scale else problem
    if problem:
        raise TrainError(
            f"{directory} {problem}, for which no MTP head can be trained yet: align a draft model "
            "with --from"
        )


def _initialise(model: PreTrainedModel) -> None:
    """Give a head on the meta device random values; its layer adds nothing at first."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape))
    for module in model.modules():
        model._init_weights(module)
    _, (layer,) = decoder_layers(model)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()


def _load_own(model: PreTrainedModel, own: HfModel, directory: Path) -> None:
    """Give a head on the meta device the values of the checkpoint's."""
    names = {id(module): name for name, module in own.model.named_modules()}
    for bound in (*own.non_layer_tensors, *(b for layer in own.layer_tensors for b in layer)):
        module = model.get_submodule(names[id(bound.module)])
        module._parameters[bound.attribute] = nn.Parameter(_values(bound, directory))


def _frozen(module: nn.Module, target: HfModel, directory: Path) -> nn.Module:
    """Return a copy of the target's module with its weights, which are not trained."""
    result = copy.deepcopy(module)
    for bound in target.non_layer_tensors:
        if bound.module is module:
            values = nn.Parameter(_values(bound, directory), requires_grad=False)
            result._parameters[bound.attribute] = values
    return result


def _values(bound: BoundTensor, directory: Path) -> torch.Tensor:
    """Read a tensor in float32."""
    if bound.packed is not None:
        raise TrainError(
            f"{directory} is packed or quantised: name the plain checkpoint, or align a draft "
            "model with --from"
        )
    parts: Iterable[torch.Tensor] = (_read(part) for part in bound.stored)
    return torch.cat([part.float() for part in parts])


def _read(record: TensorRecord) -> torch.Tensor:
    with safe_open(record.path, framework="pt") as file:
        values: torch.Tensor = file.get_tensor(record.name)
    return values
