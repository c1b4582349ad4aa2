"""DFlash heads: a few layers that fill a block of masked positions in one pass (block diffusion).

With h(t) the outputs of some of the target's layers for token t, side by side, every layer of the
head has keys and values of

    context    c(t) = hidden_norm(fc(h(t)))         for all tokens before the pending one, and
    block      [pending token, mask, mask, ...]     embedded by the target,

and queries of the block alone, whose tokens see the context and one another. The target's output
head then gives marginals of the block's positions: row i, logits of the i-th token after the
pending one, does not know the tokens chosen for other rows (DFlash, arXiv 2602.06036).

A layer is Qwen3's. Its keys and values of the context depend on the target alone, so they are
cached, and those of a block are dropped after its pass:

    model.add_context(states, positions, cache)                 appends to the cache
    model.forward_block(token_ids, positions, mask, cache)      hidden states of the block

A DFlash 2 head has more parts (dflash2.py). `forward` returns what the likeliest tokens of its
blocks score after one another, as the first of its outputs.

A cache is anything with transformers' `update(keys, values, layer)`. In training, a DynamicCache
keeps the gradients: add the context once, then pass all blocks at once with a mask of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import ModelOutput

from backends.heads.dflash.config import BlockSettings, SecondVersion
from backends.heads.dflash.dflash2 import CandidateSelector, GroupedConv, block_places
from backends.heads.gguf_tensors import StoredEmbedding


@dataclass
class BlockOutput(ModelOutput):
    """Results of a pass: transitions of all its tokens (see CandidateSelector), and logits."""

    transitions: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class DFlashLayer(Qwen3DecoderLayer):
    """A layer of Qwen3, which also takes context: tokens that have keys and values only."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any = None,
        past_key_values: Any = None,
        is_context: bool = False,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the block's hidden states [batch, n, hidden], or the context's as they are.

        places: see `block_places`; None for a context.
        """
        if is_context:
            self._add_context(hidden_states, position_embeddings, past_key_values)
            return hidden_states
        output = super().forward(
            hidden_states,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_embeddings=position_embeddings,
        )
        return output[0] if isinstance(output, tuple) else output

    def _add_context(
        self, context: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], cache: Any
    ) -> None:
        attention = self.self_attn
        shape = (*context.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(context).view(shape)).transpose(1, 2)
        values = attention.v_proj(context).view(shape).transpose(1, 2)
        _, keys = apply_rotary_pos_emb(keys, keys, *embeddings)
        cache.update(keys, values, attention.layer_idx)


class ConvolvedLayer(DFlashLayer):
    """A layer of a DFlash 2 head; convolutions run over blocks alone."""

    def __init__(self, config: PreTrainedConfig, layer: int, settings: SecondVersion) -> None:
        super().__init__(config, layer)
        self.attention_conv = GroupedConv(config.hidden_size, settings)
        self.mlp_conv = GroupedConv(config.hidden_size, settings)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        places: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if places is None:
            return super().forward(hidden_states, **options)
        normed = self.input_layernorm(hidden_states)
        convolved, delta = self.attention_conv.before(normed, places)
        attended, _ = self.self_attn(hidden_states=convolved, **options)
        hidden_states = hidden_states + self.attention_conv.after(attended, delta, places)
        normed = self.post_attention_layernorm(hidden_states)
        convolved, delta = self.mlp_conv.before(normed, places)
        output: torch.Tensor = self.mlp_conv.after(self.mlp(convolved), delta, places)
        return hidden_states + output


class BlockEmbedding(nn.Module):
    """The target's embedding, for the tokens of a block.

    Attributes:
        hidden_states: [tokens, states * hidden] of the next pass if it adds context.
        shared: the target's module; in a list, as its parameters are not the head's.
    """

    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None
        self.shared: list[nn.Module] = []
        self._scale = scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table, without a norm that the target's module may have."""
        (tokens,) = self.shared
        own: Any = getattr(tokens, "embed_scale", 1.0)
        scale = own if self._scale is None else self._scale
        return self._rows(tokens, token_ids) * scale

    def _rows(self, tokens: nn.Module, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(tokens, StoredEmbedding):
            return tokens.rows(token_ids)
        weight: Any = tokens.weight
        return functional.embedding(token_ids, weight)

    def take(self) -> torch.Tensor | None:
        """Return the hidden states of the next pass, and forget them."""
        states, self.hidden_states = self.hidden_states, None
        return states


class DFlashDraftModel(PreTrainedModel):
    """A head with the config of `load_dflash_config`. Embedding and output head are the target's:
    see `share`.

    `forward` has the interface of transformers' causal models, for TorchBackend: a pass with
    hidden states in the input embedding adds context and gives no logits, any other is of blocks.
    """

    config_class = Qwen3Config
    base_model_prefix = "model"
    _no_split_modules = ("DFlashLayer", "ConvolvedLayer")
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        block = BlockSettings.of(config)
        self.block = block
        n_states = len(block.target_layer_ids)
        self.fc = nn.Linear(n_states * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        second = block.second
        self.layers = nn.ModuleList(
            DFlashLayer(config, i) if second is None else ConvolvedLayer(config, i, second)
            for i in range(config.num_hidden_layers)
        )
        self.candidate_selector = (
            None
            if second is None
            else CandidateSelector(config.hidden_size, config.vocab_size, second)
        )
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.block_embedding = BlockEmbedding(block.embedding_scale)
        self._output_head: list[nn.Module] = []
        for layer, looks_ahead in zip(self.layers, block.looks_ahead, strict=True):
            layer.self_attn.is_causal = not looks_ahead
        self.post_init()

    def share(self, embedding: nn.Module, output_head: nn.Module) -> None:
        """Use the target's embedding and output head from now on."""
        self.block_embedding.shared, self._output_head = [embedding], [output_head]

    def get_input_embeddings(self) -> nn.Module:
        return self.block_embedding

    def get_output_embeddings(self) -> nn.Module:
        (head,) = self._output_head
        return head

    def get_decoder(self) -> DFlashDraftModel:
        return self

    def add_context(self, states: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
        """Add keys and values of context tokens [batch, n] to the cache.

        states: [batch, n, len(target_layer_ids) * hidden].
        """
        context = self.hidden_norm(self.fc(states))
        embeddings = self.rotary_emb(context, positions)
        for layer in self.layers:
            context = layer(
                context,
                position_embeddings=embeddings,
                past_key_values=cache,
                is_context=True,
            )

    def forward_block(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: Any, cache: Any
    ) -> torch.Tensor:
        """Return the final hidden states [batch, n, hidden] of the blocks' tokens [batch, n].

        mask: of the attention implementation's kind; additive [batch, 1, n, keys] for "sdpa".
        """
        hidden = self.block_embedding(token_ids).to(self.norm.weight.dtype)
        embeddings = self.rotary_emb(hidden, positions)
        places = block_places(token_ids, positions, self.block.mask_token_id)
        for layer in self.layers:
            hidden = layer(
                hidden,
                position_embeddings=embeddings,
                attention_mask=mask,
                past_key_values=cache,
                places=places,
            )
        result: torch.Tensor = self.norm(hidden)
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., vocab] of final hidden states [..., hidden]."""
        head: Any = self.get_output_embeddings()
        weight = getattr(head, "weight", None)  # a GGUF model's is no parameter
        logits: torch.Tensor = head(hidden if weight is None else hidden.to(weight.dtype))
        logits = logits * self.block.logit_scale
        cap = self.block.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        logits_to_keep: torch.Tensor | None = None,
        **options: Any,
    ) -> BlockOutput:
        states = self.block_embedding.take()
        if states is not None:
            self.add_context(states[None], position_ids, past_key_values)
            n_tokens = input_ids.shape[1] if logits_to_keep is None else len(logits_to_keep)
            empty = states.new_zeros(()).expand(1, n_tokens, self.config.vocab_size)
            return BlockOutput(logits=empty)
        hidden = self.forward_block(input_ids, position_ids, attention_mask, past_key_values)
        rows = torch.arange(hidden.shape[1]) if logits_to_keep is None else logits_to_keep
        hidden = hidden[:, rows]
        logits = self.logits(hidden)
        if self.candidate_selector is None:
            return BlockOutput(logits=logits)
        places = block_places(input_ids, position_ids, self.block.mask_token_id)[0, rows]
        pending = torch.where(places == 1, input_ids[0, rows - 1], -1)
        own = self.candidate_selector(logits[0], hidden[0], pending)
        is_first = torch.ones_like(rows, dtype=torch.bool)  # of rows that are there repeatedly
        is_first[1:] = rows[1:] != rows[:-1]
        transitions = own.new_zeros(1, input_ids.shape[1], own.shape[-1])
        transitions[0, rows[is_first]] = own[is_first]
        return BlockOutput(transitions, logits)
