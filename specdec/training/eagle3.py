"""An EAGLE-3 head in training (Li et al. 2025, arXiv 2503.01840).

A new one has the target's whole vocabulary, and no output head of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig

from backends.heads.eagle3 import FusedEmbedding, eagle3_skeleton
from backends.heads.eagle3_config import EAGLE3_CLASS, Eagle3Config
from specdec.training.head import initialise, layer_sizes, spread_layers
from specdec.training.options import TrainError
from specdec.training.repeated import RepeatedHead, Step, step_positions

_NUM_STATES = 3
"""Hidden states of a token that a head takes: low, middle and high."""


class Eagle3Draft(RepeatedHead):
    """A new EAGLE-3 head, whose layer begins as a no-op.

    Args:
        directory, vocab_size: see TargetHead.
        intermediate_size: neurons of its layer; None: as the target's layers.

    Raises TrainError, UnsupportedModel.
    """

    is_new = True

    def __init__(
        self, directory: Path, vocab_size: int, *, intermediate_size: int | None = None
    ) -> None:
        super().__init__(directory, vocab_size)
        target = self._target
        self.hidden_layers = spread_layers(len(target.layers), _NUM_STATES)
        if len(self.hidden_layers) < _NUM_STATES:
            raise TrainError(
                f"{directory} has {len(target.layers)} layers, and an EAGLE-3 head takes the "
                f"states of {_NUM_STATES}: train an MTP head (--kind mtp)"
            )
        self._config = self._new_config(intermediate_size)
        self._model = self.module = eagle3_skeleton(self._config, _NUM_STATES, target.dtype)
        self._model.set_attn_implementation("sdpa")
        initialise(self._model, self._model.get_decoder().layers)
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, FusedEmbedding), "the skeleton has one"
        self._fused = embedding

    def _new_config(self, intermediate_size: int | None) -> Eagle3Config:
        sizes = layer_sizes(self._target, intermediate_size)
        layer = LlamaConfig(**sizes, num_hidden_layers=1)
        inputs = tuple(layer + 1 for layer in self.hidden_layers)
        return Eagle3Config(layer, self.hidden_size, inputs)

    def _run(
        self, token_ids: torch.Tensor, states: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> Step:
        fused, decoder = self._fused, self._model.get_decoder()
        fused.tokens, fused.hidden_states = self._embedding, states
        try:
            joined = fused(token_ids)
        finally:
            fused.hidden_states = fused.tokens = None  # no parameters of the head
        (layer,) = decoder.layers
        positions = step_positions(token_ids, cache)
        output = layer(
            joined,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            position_embeddings=decoder.rotary_emb(joined, positions),
        )
        return Step(decoder.norm(output), output)

    def save(self, folder: Path) -> None:
        tensors = {}
        for name, parameter in self._model.named_parameters():
            stored = name.removeprefix("model.").removeprefix("embed_tokens.")
            tensors[stored] = parameter.detach().to("cpu", self.dtype).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(self._written_config(), indent=2, default=str) + "\n"
        (folder / "config.json").write_text(text, encoding="utf-8")

    def _written_config(self) -> dict[str, Any]:
        """Return the config as SpecForge writes it, where a layer stands for its output."""
        layers = {"eagle_aux_hidden_state_layer_ids": list(self.hidden_layers)}
        return {
            **self._config.layer.to_dict(),
            "architectures": [EAGLE3_CLASS],
            "draft_vocab_size": self._config.layer.vocab_size,
            "target_hidden_size": self.hidden_size,
            "eagle_config": {"use_aux_hidden_state": True, **layers},
        }
