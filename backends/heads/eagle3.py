"""EAGLE-3 heads: one layer that predicts the next tokens from three of the target's hidden states.

For token t and the target's states l, m, h (low, middle, high) of the token before it, a head
computes (EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.1)

    g = fc([l, m, h]),    a = g + attention([norm(embedding(t)), norm(g)]),
    g' = a + mlp(norm(a)),    logits = head(norm(g'))

and is run repeatedly, with g' in place of g. Its vocabulary is a part of the target's.

So it is built as a Llama model of one layer, whose embedding returns [embedding(t), g] side by
side, and whose head returns logits of the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from backends.checkpoint.matching import TensorMatch
from backends.checkpoint.skeleton import build_skeleton, parameters_on_meta
from backends.contract.backend import LAST_HIDDEN_STATE, UnsupportedModel
from backends.heads.eagle3_config import Eagle3Config
from backends.heads.eagle3_files import EMBEDDING, HEAD, Eagle3Files, open_gguf, open_safetensors
from backends.heads.target import HeadTarget
from backends.hf.loading import bind_checkpoint
from backends.hf.model import HfModel
from offload.formats.tensors import CheckpointError, TensorRecord


@dataclass(frozen=True)
class Eagle3Head:
    """A head on the meta device."""

    model: HfModel
    files: Eagle3Files
    target_layers: tuple[int, ...]
    """Layers of the target whose outputs it takes."""

    @property
    def has_own_output(self) -> bool:
        """Whether its output head is not the target's."""
        return HEAD in self.files.records

    @property
    def own_layers(self) -> tuple[int, ...]:
        """Layers of the head whose output it goes on from."""
        return (LAST_HIDDEN_STATE,) if self.files.config.norm_output else (0,)


class FusedEmbedding(nn.Module):
    """Embedding of a head: tokens [1, n, hidden] and hidden states [1, n, hidden] side by side.

    Attributes:
        tokens: the head's own embedding, or the target's, set once the head's tensors are matched.
        hidden_states: to be set before each pass: [n, layers * target's hidden] from the target, or
            [n, hidden] from the head itself; or with a batch in front.
    """

    def __init__(self, config: Eagle3Config, n_layers: int) -> None:
        super().__init__()
        self.tokens: nn.Module | None = None
        self.hidden_states: torch.Tensor | None = None
        self._hidden_size, width = config.layer.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(n_layers * width, self._hidden_size, bias=False)
        eps = config.layer.rms_norm_eps
        self.input_norm = LlamaRMSNorm(n_layers * width, eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(width, eps) for _ in range(n_layers)] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.tokens is not None, "an embedding is set when the head is built"
        assert self.hidden_states is not None, "hidden states are set before each pass"
        states = self.hidden_states.reshape(*token_ids.shape, -1)
        if states.shape[-1] != self._hidden_size:
            states = self._fused(states)
        return torch.cat([self.tokens(token_ids), states], dim=-1)

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        if self.fc_norm:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        fused: torch.Tensor = self.fc(states)
        return fused


class Eagle3Layer(nn.Module):
    """Layer of a head: [1, n, 2 * hidden] of FusedEmbedding -> [1, n, hidden]."""

    def __init__(self, layer: LlamaDecoderLayer, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        size = config.layer.hidden_size
        self.hidden_norm = LlamaRMSNorm(size, config.layer.rms_norm_eps)
        self._norms_before_residual = config.norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            has_bias = narrow.bias is not None
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=has_bias))

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        tokens, states = hidden_states.chunk(2, dim=-1)
        normed = self.hidden_norm(states)
        residual = normed if self._norms_before_residual else states
        joined = torch.cat([self.input_layernorm(tokens), normed], dim=-1)
        attended, _ = self.self_attn(hidden_states=joined, **options)
        residual = residual + attended
        result: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return result


class MappedHead(nn.Module):
    """Output head over a part of a vocabulary: [..., hidden] -> logits [..., vocab_size], -inf for
    all other tokens.

    target_ids: the token of each output, int64 [outputs].
    """

    def __init__(self, hidden_size: int, vocab_size: int, target_ids: torch.Tensor) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.linear = nn.Linear(hidden_size, len(target_ids), bias=False)
        self.register_buffer("target_ids", target_ids, persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden_states)
        everything = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        return everything.index_copy_(-1, self.target_ids, logits)


def load_eagle3_head(target: HeadTarget, path: Path) -> Eagle3Head:
    """Build the head in a folder or a GGUF file for a target, on the meta device.

    The embedding is the target's, unless the head has another one, and so is an output head that
    it lacks: its passes need the target to be loaded.

    Raises CheckpointError, and UnsupportedModel if it does not fit the target.
    """
    files = (open_gguf if path.is_file() else open_safetensors)(path, target.dtype)
    config = files.config
    layers = config.layers_for(target, path)
    target.check_layers(layers, path)
    if len(layers) * config.target_hidden_size == config.layer.hidden_size:
        raise UnsupportedModel(
            f"{path} fuses states of as many numbers as its own have: such heads are not supported"
        )
    own = dict(files.records)
    if files.stored is None and EMBEDDING in own and target.is_embedding(own[EMBEDDING]):
        del own[EMBEDDING]
    _check_shared(path, config, files, own)
    model = eagle3_skeleton(
        config,
        len(layers),
        files.dtype,
        has_embedding=EMBEDDING in own,
        has_head=HEAD in own,
        target_ids=files.target_ids,
    )
    if files.rope_factors is not None:
        model.get_decoder().rotary_emb.inv_freq /= files.rope_factors
    embedding = model.get_input_embeddings()
    named = {_parameter(name, files): record for name, record in own.items()}
    unknown = sorted(named.keys() - dict(model.named_parameters()).keys())
    if unknown:
        raise UnsupportedModel(
            f"{path} has {len(unknown)} tensors that no EAGLE-3 head of Llama's layers has, first "
            f"{unknown[0]}: name a draft model, or leave -md out"
        )
    match = TensorMatch(named, {})
    bound = bind_checkpoint(model, files.index, files.dtype, path, {}, match)
    if embedding.tokens is None:
        embedding.tokens = target.embedding(files.dtype)
    if HEAD not in own:
        model.set_output_embeddings(target.output_head())
    return Eagle3Head(bound, files, layers)


def _check_shared(
    path: Path, config: Eagle3Config, files: Eagle3Files, own: dict[str, TensorRecord]
) -> None:
    """Raise CheckpointError if the head lacks a tensor that the target cannot replace."""
    has_other_size = config.layer.hidden_size != config.target_hidden_size
    lacking = [name for name in (EMBEDDING, HEAD) if name not in own and has_other_size]
    if HEAD not in own and files.target_ids is not None:
        lacking.append(HEAD)
    if lacking:
        raise CheckpointError(
            f"{path} lacks {lacking[0]}, and the target's does not fit it: download the head again"
        )


def eagle3_skeleton(
    config: Eagle3Config,
    n_layers: int,
    dtype: torch.dtype,
    *,
    has_embedding: bool = False,
    has_head: bool = False,
    target_ids: torch.Tensor | None = None,
) -> PreTrainedModel:
    """Return a head on the meta device: a Llama model of one layer with the modules of a head.

    Its embedding is a FusedEmbedding. Without an embedding or an output head of its own it has no
    tokens and the identity in their places.

    Args:
        n_layers: layers of the target whose outputs it takes.
        target_ids: see MappedHead; None for an output head of the whole vocabulary.
    """
    layer = config.layer
    model = build_skeleton(layer, dtype)
    decoder = model.get_decoder()
    with parameters_on_meta():
        embedding = FusedEmbedding(config, n_layers)
        if has_embedding:
            embedding.tokens = nn.Embedding(layer.vocab_size, layer.hidden_size, device="meta")
        decoder.layers[0] = Eagle3Layer(decoder.layers[0], config)
        if target_ids is not None:
            head = MappedHead(layer.hidden_size, layer.vocab_size, target_ids)
            model.set_output_embeddings(head)
        elif not has_head:
            model.set_output_embeddings(nn.Identity())
    model.set_input_embeddings(embedding)
    return model


def _parameter(name: str, files: Eagle3Files) -> str:
    """Return the parameter of the model that a tensor of the head is for."""
    if name == EMBEDDING:
        return "model.embed_tokens.tokens.weight"
    if name == HEAD:
        return HEAD if files.target_ids is None else "lm_head.linear.weight"
    is_of_embedding = name.startswith(("fc.", "input_norm.", "fc_norm."))
    return f"model.embed_tokens.{name}" if is_of_embedding else f"model.{name}"
