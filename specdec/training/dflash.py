"""A DFlash head in training: blocks after random tokens of the text (arXiv 2602.06036).

All blocks of a window are one pass. Each sees the context before its first token, which is the
text's, and itself; its masks are to become the tokens after that one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from backends.contract.backend import LAST_HIDDEN_STATE
from backends.heads.dflash.model import DFlashDraftModel
from backends.heads.dflash.source import load_dflash_head
from backends.heads.target import CheckpointTarget
from specdec.training.data import Batch
from specdec.training.head import (
    TargetHead,
    initialise,
    layer_sizes,
    load_values,
    spread_layers,
)
from specdec.training.trainable import in_bf16, likeliest, rows_loss

BLOCK_SIZE = 16
"""Tokens of a new head's blocks, with the pending one; as published heads have it."""
_DECAY_TOKENS = 7.0
"""The weight of a mask's loss falls by a factor e over so many masks: earlier tokens are accepted
more often (DFlash's, for blocks of 16)."""
_TOKENS_PER_BLOCK = 16
"""A window has one block for so many tokens in a step."""
_MEASURED_BLOCKS = 32
"""Blocks of a window in one pass when they are measured."""
_NUM_LAYERS = 2
_MIN_STATES = 3
_MAX_STATES = 5
_LAYERS_PER_STATE = 4
"""A head takes the states of one of so many layers of the target, from _MIN_STATES to _MAX_STATES
of them: published ones take five, of the second layer to the last but two of 36 (Qwen3-8B)."""


class DFlashDraft(TargetHead):
    """A DFlash head: that of a folder, or a new one whose layers begin as no-ops.

    Args:
        directory, vocab_size: see TargetHead.
        folder: of a head to train further.
        num_layers: of a new head.
        intermediate_size: neurons of a new head's layers; None: as the target's.

    Raises TrainError, UnsupportedModel.
    """

    def __init__(
        self,
        directory: Path,
        vocab_size: int,
        *,
        folder: Path | None = None,
        num_layers: int | None = None,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__(directory, vocab_size)
        self.is_new = folder is None
        if folder is None:
            config = self._new_config(num_layers or _NUM_LAYERS, intermediate_size)
        else:
            stored = load_dflash_head(CheckpointTarget(self._target), folder)
            config = stored.config
        self._model = DFlashDraftModel._from_config(config, attn_implementation="sdpa")
        self._model.float().eval()
        self.module = self._model
        if folder is None:
            initialise(self._model, self._model.layers)
        else:
            load_values(self._model, stored, folder)
        self._model.share(self._embedding, self._output_head)
        last = len(self._target.layers) - 1
        layers = self._model.block.target_layer_ids
        self.hidden_layers = tuple(LAST_HIDDEN_STATE if i == last else i for i in layers)

    def _new_config(self, num_layers: int, intermediate_size: int | None) -> PreTrainedConfig:
        target = self._target.config
        n_layers = len(self._target.layers)
        n_states = max(_MIN_STATES, min(_MAX_STATES, n_layers // _LAYERS_PER_STATE))
        config: PreTrainedConfig = Qwen3Config(
            **layer_sizes(self._target, intermediate_size),
            num_hidden_layers=num_layers,
            tie_word_embeddings=False,
            architectures=["DFlashDraftModel"],
        )
        config.num_target_layers = n_layers
        config.dflash_config = {
            "block_size": BLOCK_SIZE,
            "mask_token_id": _mask_token(target),
            "target_layer_ids": list(spread_layers(n_layers, n_states)),
        }
        return config

    def loss(self, batch: Batch) -> torch.Tensor:
        size, length = self._model.block.size, batch.token_ids.shape[1]
        # The batch decides the places: a training that is continued has those of one that was not.
        generator = torch.Generator().manual_seed(int(batch.token_ids.sum()))
        n_blocks = max(1, length // _TOKENS_PER_BLOCK)
        starts = 1 + torch.randperm(length - 1, generator=generator)[:n_blocks]
        starts = starts.to(batch.token_ids.device)
        rows = _rows_of(batch)
        total, weights = torch.zeros((), device=batch.token_ids.device), 0.0
        with in_bf16(batch.token_ids.device):
            hidden = self._blocks(batch, starts, self._context(batch))
            for i in range(1, size):
                known = starts + i - 1 < length
                of_mask = rows[:, (starts + i - 1)[known]]
                is_known = of_mask >= 0
                if is_known.any():
                    states = hidden[:, known, i][is_known]
                    targets = batch.targets.rows(of_mask[is_known])
                    weight = math.exp(-(i - 1) / _DECAY_TOKENS)
                    loss = rows_loss(states, self._output_head, targets, self._vocab_size)
                    total, weights = total + weight * loss, weights + weight
        return total / weights if weights else hidden.sum() * 0.0

    def agreements(self, batch: Batch, depth: int) -> torch.Tensor:
        expected = likeliest(batch)
        length = expected.shape[1]
        depth_of_block = min(depth, self._model.block.size - 1)
        result = torch.zeros((depth, *expected.shape), dtype=torch.bool, device=expected.device)
        with in_bf16(batch.token_ids.device):
            for starts in torch.arange(1, length).split(_MEASURED_BLOCKS):
                starts = starts.to(expected.device)
                hidden = self._blocks(batch, starts, self._context(batch))
                rows = self._output_head(hidden[:, :, 1 : 1 + depth_of_block])
                tokens = rows[..., : self._vocab_size].argmax(-1)
                for step in range(depth_of_block):
                    known = starts[starts + step < length]
                    agrees = tokens[:, : len(known), step] == expected[:, known + step]
                    result[step][:, known] = agrees
        return result

    def _context(self, batch: Batch) -> DynamicCache:
        assert batch.hidden_states is not None, "the traces of a head have hidden states"
        cache, length = DynamicCache(), batch.token_ids.shape[1]
        positions = torch.arange(length, device=batch.token_ids.device)[None]
        self._model.add_context(batch.hidden_states.float(), positions, cache)
        return cache

    def _blocks(self, batch: Batch, starts: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Return the final hidden states [batch_size, blocks, size, hidden] of the blocks that
        begin with the tokens at `starts`."""
        size, block = self._model.block.size, self._model.block
        pending = batch.token_ids[:, starts]
        masks = pending.new_full((*pending.shape, size - 1), block.mask_token_id)
        token_ids = torch.cat([pending[..., None], masks], dim=-1).flatten(1)
        positions = (starts[:, None] + torch.arange(size, device=starts.device)).flatten()[None]
        mask = block_mask(starts, batch.token_ids.shape[1], size)
        hidden = self._model.forward_block(token_ids, positions, mask, cache)
        return hidden.unflatten(1, (len(starts), size))

    def save(self, folder: Path) -> None:
        self._model.to(self.dtype).save_pretrained(folder)


def block_mask(starts: torch.Tensor, length: int, size: int) -> torch.Tensor:
    """Return the additive mask [1, 1, blocks * size, length + blocks * size]: a block sees the
    context before its start, and itself."""
    n_blocks = len(starts)
    context = torch.arange(length, device=starts.device)[None] < starts[:, None]
    own = torch.eye(n_blocks, dtype=torch.bool, device=starts.device)
    is_seen = torch.cat([context, own.repeat_interleave(size, dim=1)], dim=1)
    is_seen = is_seen.repeat_interleave(size, dim=0)
    mask = torch.zeros(is_seen.shape, device=starts.device)
    return mask.masked_fill(~is_seen, torch.finfo(torch.float32).min)[None, None]


def _rows_of(batch: Batch) -> torch.Tensor:
    """Return the row of the batch's targets after each token, or -1: [batch_size, length]."""
    rows = torch.full_like(batch.token_ids, -1)
    rows[batch.windows, batch.positions] = torch.arange(len(batch.windows), device=rows.device)
    return rows


def _mask_token(config: Any) -> int:
    """Return a token that is never pending, as a sequence ends with it."""
    ids = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
    for token in ids:
        if isinstance(token, list):
            token = token[0]
        if token is not None and 0 <= token < config.vocab_size:
            return int(token)
    return int(config.vocab_size) - 1
