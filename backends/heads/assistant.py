"""Gemma 4 assistants: heads of a few layers that attend to keys and values of the target.

For the pending token t and the target's last hidden state h of the token before it, a head computes

    x = pre_projection([embedding(t), h]),    y = norm(layers(x)),
    logits = lm_head(y),                      h' = post_projection(y)

and is run repeatedly, with h' in place of h. Its layers have queries alone: those of a layer type
("full_attention", "sliding_attention") attend to what the target's last layer of that type has
cached of the tokens before t. Every token is computed as if it were at the position of t, and no
drafted token sees another one (transformers' SinglePositionMultiTokenCandidateGenerator; after a
rejection it also shows the head the key of the rejected token, at the place of t).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Gemma4AssistantConfig, Gemma4TextConfig, Gemma4TextModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import (
    Gemma4AssistantMaskedEmbedder,
    Gemma4AssistantOutput,
    Gemma4AssistantPreTrainedModel,
)

from backends.checkpoint.config import config_faults, head_shape
from backends.checkpoint.kinds import read_raw
from backends.checkpoint.layer_count import refuse_absurd_count
from backends.checkpoint.quantised import packed_tensors
from backends.checkpoint.raw_config import refuse_nonsense
from backends.checkpoint.sizes import check_figures
from backends.checkpoint.skeleton import build_own_model
from backends.contract.backend import Backend, BackendError, UnsupportedModel
from backends.contract.source import BackendOptions, Loading
from backends.heads.eagle3_files import read_integers
from backends.heads.kinds import ASSISTED
from backends.heads.source import HeadSource
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.loading import main_dtype, match_checkpoint
from backends.hf.model import HfModel
from backends.hf.source import HfSource
from backends.kv.layer import Rows
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import CheckpointError

_ORDER = "masked_embedding.token_ordering"
"""Name of the tensor with the tokens of each cluster, one cluster after the other."""


class CachedStates(Protocol):
    """Keys and values of a decoder layer."""

    @property
    def rows(self) -> tuple[Rows, Rows]:
        """Keys and values [1, heads, rows, dim]."""


class JoinedEmbedding(nn.Module):
    """The target's embedding of a token, and a hidden state beside it: [1, n, 2 * hidden].

    Attributes:
        hidden_states: [n, hidden] of the target, to be set before each pass.
        shared: the target's module; in a list, as its parameters are not the head's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hidden_states: torch.Tensor | None = None
        self.shared: list[nn.Module] = []

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.hidden_states is not None, "hidden states are set before each pass"
        (tokens,) = self.shared
        states = self.hidden_states[None]
        return torch.cat([tokens(token_ids).to(states.dtype), states], dim=-1)


class QueriesOnlyConfig(Gemma4TextConfig):
    """Config of layers that all attend to keys of another model; transformers 5.23 refuses its own
    assistants, since none of their layers caches keys for the others."""

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        return ["reuse"] * self.num_hidden_layers


class AssistantDraftModel(Gemma4AssistantPreTrainedModel):
    """transformers' assistant with the interface of its causal models, for TorchBackend."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        text = config.get_text_config()
        self.vocab_size = text.vocab_size
        self.model = Gemma4TextModel(text)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        width = config.backbone_hidden_size
        self.pre_projection = nn.Linear(2 * width, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, width, bias=False)
        self.masked_embedding = (
            Gemma4AssistantMaskedEmbedder(config) if config.use_ordered_embeddings else None
        )
        if self.masked_embedding is not None:  # ids, which are no weights: see _fill_clusters
            order = self.masked_embedding.token_ordering
            self.masked_embedding.register_buffer("token_ordering", order, persistent=False)
        self.post_init()
        self.joined_embedding = JoinedEmbedding()
        self._context: Mapping[str, CachedStates] = {}

    def share(self, embedding: nn.Module) -> None:
        """Use the target's embedding from now on."""
        self.joined_embedding.shared = [embedding]

    def attend_to(self, context: Mapping[str, CachedStates]) -> None:
        """Attend to these keys and values of the target, by layer type."""
        self._context = context

    def get_input_embeddings(self) -> nn.Module:
        return self.joined_embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def get_decoder(self) -> nn.Module:
        return self

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        logits_to_keep: torch.Tensor | None = None,
        **options: Any,
    ) -> Gemma4AssistantOutput:
        """Return logits of the tokens [1, n] in `logits_to_keep`, and hidden states of all."""
        context = {kind: layer.rows for kind, layer in self._context.items()}
        hidden = self.model(
            inputs_embeds=self.pre_projection(self.joined_embedding(input_ids)),
            attention_mask=dict.fromkeys(context, attention_mask),
            position_ids=position_ids,
            shared_kv_states=context,
            use_cache=False,
            logits_to_keep=None,  # a number would drop rows before the layers
        ).last_hidden_state
        states = self.post_projection(hidden)
        selected = hidden if logits_to_keep is None else hidden[:, logits_to_keep]
        head = self.lm_head if self.masked_embedding is None else self._logits_of_clusters
        return Gemma4AssistantOutput(last_hidden_state=states, logits=head(selected))

    def _logits_of_clusters(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of the tokens of each row's likeliest clusters, -inf for all others."""
        clusters: Any = self.masked_embedding
        likeliest = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k).indices
        tokens = clusters.token_ordering.view(clusters.num_centroids, -1)
        logits = hidden.new_full((*hidden.shape[:-1], self.vocab_size), -torch.inf)
        for row, own in enumerate(likeliest[0]):
            ids = tokens[own].flatten()
            logits[0, row, ids] = self.lm_head.weight[ids] @ hidden[0, row]
        return logits


@dataclass(frozen=True)
class AssistantHead(HfModel):
    """A head on the meta device, matched to its checkpoint.

    Attributes:
        context_layers: the target's layer that the layers of a type attend to, by index.
    """

    context_layers: Mapping[str, int] | None = None

    def window(self, layer: int) -> int | None:
        """See HfModel.window; a row sees sliding_window + 1 keys, the last of which is at distance
        1 (transformers' create_bidirectional_sliding_window_mask)."""
        if self.config.layer_types[layer] != "sliding_attention":
            return None
        return int(self.config.sliding_window) + 2


def load_assistant(target: HfModel, directory: Path) -> AssistantHead:
    """Build the head of a folder for a target, on the meta device, and match its tensors.

    Raises CheckpointError, and UnsupportedModel where it is the head of another target.
    """
    raw = read_raw(directory)
    with config_faults(directory):
        refuse_nonsense(directory)
        refuse_absurd_count(directory)
        text = {**raw["text_config"], "model_type": Gemma4TextConfig.model_type}
        settings = {**raw, "text_config": QueriesOnlyConfig.from_dict(text)}
        config: PreTrainedConfig = Gemma4AssistantConfig.from_dict(settings)
        config.get_text_config().allow_global_per_layer_attribute_access = True
        check_figures(config.get_text_config())
        index = WeightIndex.from_directory(directory)
        dtype = main_dtype(index, config, directory)
        _check_fits(directory, config, target)
        model = build_own_model(AssistantDraftModel, config, dtype)
    context_layers = _context_layers(directory, model, target)
    packed = packed_tensors(index, config, dtype, directory)
    head = match_checkpoint(model, index, dtype, directory, packed)
    _fill_clusters(directory, model, index)
    model.share(target.model.get_input_embeddings())
    values = {field.name: getattr(head, field.name) for field in fields(HfModel)}
    return AssistantHead(**values, context_layers=context_layers)


def _check_fits(directory: Path, config: PreTrainedConfig, target: HfModel) -> None:
    own, family = config.get_text_config(), target.config.model_type
    pairs = {
        "hidden states of {} numbers": (config.backbone_hidden_size, target.config.hidden_size),
        "a vocabulary of {}": (own.vocab_size, target.vocab_size),
    }
    reason = next(
        (f"for {k.format(a)}, and the target has {b}" for k, (a, b) in pairs.items() if a != b), ""
    )
    if family not in ASSISTED:
        reason = f"for Gemma 4, and the target is {family}"
    if reason:
        raise UnsupportedModel(
            f"{directory} is a draft head {reason}: take the head that was made for this model"
        )


def _context_layers(directory: Path, model: AssistantDraftModel, target: HfModel) -> dict[str, int]:
    """Return the target's last layer of each type that caches keys, for the types of the head.

    Raises UnsupportedModel if the heads of the two differ.
    """
    attention = [layer.self_attn for layer in target.layers]
    last = {a.layer_type: i for i, a in enumerate(attention) if not a.is_kv_shared_layer}
    n_heads = model.config.get_text_config().num_attention_heads
    layers = {}
    for own in (layer.self_attn for layer in model.model.layers):
        at = last.get(own.layer_type)
        shape = None if at is None else head_shape(target.config, target.layers[at])
        heads = (n_heads // own.num_key_value_groups, own.head_dim)
        if at is None or shape is None or (shape.n_kv_heads, shape.key_dim) != heads:
            of_target = (
                "none" if shape is None else f"{shape.n_kv_heads} of {shape.key_dim} numbers"
            )
            raise UnsupportedModel(
                f"{directory} attends to {heads[0]} heads of {heads[1]} numbers in "
                f"{own.layer_type}, and the target has {of_target}: take the head that was made "
                "for this model"
            )
        layers[own.layer_type] = at
    return layers


def _fill_clusters(directory: Path, model: AssistantDraftModel, index: WeightIndex) -> None:
    """Read the tokens of each cluster. Raises CheckpointError if they are not the vocabulary."""
    clusters: Any = model.masked_embedding
    if clusters is None:
        return
    record = index.get(_ORDER)
    tokens = torch.empty(0) if record is None else read_integers(record)
    if not torch.equal(tokens.sort().values, torch.arange(model.vocab_size)):
        raise CheckpointError(
            f"{directory} lacks {_ORDER}, or it is no order of the {model.vocab_size} tokens of "
            "its vocabulary: download the head again"
        )
    clusters.token_ordering = tokens


class AssistantSource(HeadSource):
    """The folder of a Gemma 4 assistant. It has no KV cache: it attends to the target's.

    `load` needs the backend of the target: see `share_weights`.
    """

    attends_to_target = True

    def __init__(self, target: HfSource, options: BackendOptions, directory: Path) -> None:
        head = load_assistant(target.model, directory)
        super().__init__(directory, options, head, CheckpointTarget(target.model))

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head that a token is computed with."""
        model: Any = self.model.model
        if model.masked_embedding is None:
            return super().head_bytes
        clusters = model.masked_embedding
        n_tokens = clusters.centroid_intermediate_top_k * clusters.vocab_size_per_centroid
        num_rows = clusters.num_centroids + n_tokens
        return int(num_rows * clusters.hidden_size * self.model.dtype.itemsize)

    def _load(self, loading: Loading) -> Backend:
        head, owner = self.model, self._owner
        assert isinstance(head, AssistantHead)
        assert isinstance(head.model, AssistantDraftModel)
        assert head.context_layers is not None
        if not isinstance(owner, TorchBackend):
            raise BackendError("a draft head is loaded after its target")
        backend = super()._load(loading)
        head.model.attend_to(owner.cached_states(head.context_layers))
        backend.attends_to_target = True
        return backend
