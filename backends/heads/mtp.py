"""MTP heads of checkpoints: one more layer of the target, which predicts the token after the next.

For token t and the target's last hidden state h of the token before it, the head computes

    x = eh_proj([enorm(embedding(t)), hnorm(h)]),    h' = norm(layer(x)),    logits = head(h')

and is run repeatedly, with h' in place of h (DeepSeek-V3, 2024, section 2.2). So it is built as a
model of the target's family with a single layer and an embedding that also takes h.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_layers import MtpModel

from backends.checkpoint.kinds import read_raw
from backends.checkpoint.matching import CurrentNames, TensorMatch, known_tensors
from backends.checkpoint.quantised import packed_tensors
from backends.checkpoint.skeleton import build_skeleton, decoder_layers, parameters_on_meta
from backends.contract.backend import UnsupportedModel
from backends.heads.mtp_files import check_fits, mtp_names, mtp_tensors, renamed
from backends.hf.loading import bind_checkpoint
from backends.hf.model import HfModel
from backends.packed.tensor import PackedTensor
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import TensorIndex, TensorRecord

_ATTENTION = "full_attention"


class JoinedEmbedding(nn.Module):
    """Embedding of an MTP head: tokens joined with hidden states.

    Attributes:
        tokens: the target's embedding; set once the head's own tensors are matched.
        hidden_states: [tokens, hidden], or with a batch in front, to be set before each pass.
    """

    def __init__(self, norm: nn.Module, hidden_size: int, *, has_states_first: bool) -> None:
        super().__init__()
        self.tokens: nn.Module | None = None
        self.hidden_states: torch.Tensor | None = None
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False, device="meta")
        self._has_states_first = has_states_first

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.tokens is not None, "the target's embedding is set when the head is built"
        assert self.hidden_states is not None, "hidden states are set before each pass"
        embedded = self.tokens(token_ids)
        states = self.hidden_states.reshape(embedded.shape)
        parts = [self.enorm(embedded), self.hnorm(states)]
        return self.eh_proj(torch.cat(parts[::-1] if self._has_states_first else parts, dim=-1))


def load_mtp_head(target: HfModel, directory: Path) -> HfModel:
    """Build the MTP head of a target on the meta device and match its tensors.

    Of several heads for one token each, the first is taken. Its embedding and output head are the
    target's modules, so its passes need the target to be loaded.

    Raises UnsupportedModel where the checkpoint has none, or of a kind that is not known.
    """
    names = frozenset(mtp_tensors(target.index, len(target.layers)))
    if not names:
        raise UnsupportedModel(
            f"{directory} has no MTP head (no tensors of mtp.* or of a layer after the last): name "
            "a draft model, or leave -md out"
        )
    packed = packed_tensors(target.index, target.model.config, target.dtype, directory)
    known = known_tensors(target.index, packed)
    own = {name: record for name, record in known.items() if name in names}
    model = mtp_skeleton(target)
    records = _by_parameter(own, target, model)
    return _bound(model, target, target.index, records, directory, packed)


def load_mtp_folder(target: HfModel, folder: Path) -> HfModel:
    """Build the MTP head that a folder has for a target; see `load_mtp_head`.

    Raises UnsupportedModel for a head of another target.
    """
    check_fits(folder, target.config.to_dict())
    config = with_own_sizes(target.config, read_raw(folder))
    index, model = WeightIndex.from_directory(folder), mtp_skeleton(target, config)
    starts = mtp_names(decoder_layers(model)[0])
    named = ((renamed(name, starts), record) for name, record in index.items())
    records = {name: record for name, record in named if name is not None}
    return _bound(model, target, index, records, folder, {})


def with_own_sizes(config: PreTrainedConfig, raw: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a target's config with what a head's may have another value of."""
    own = copy.deepcopy(config)
    size = raw.get("intermediate_size")
    if type(size) is int and size > 0:
        own.intermediate_size = size
    return own


def mtp_skeleton(target: HfModel, config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """Return a target's MTP head on the meta device. It has no modules of the target yet: its
    embedding is a JoinedEmbedding without tokens, its output head the identity.

    config: see `with_own_sizes`; None: the target's.

    Raises UnsupportedModel.
    """
    config = _head_config(config or target.config)
    model = build_skeleton(config, target.dtype)
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedModel(f"MTP heads of {config.model_type} are not supported")
    has_states_first = bool(getattr(config, "mtp_hidden_states_first", False))
    embedding = JoinedEmbedding(norm, config.hidden_size, has_states_first=has_states_first)
    model.set_input_embeddings(embedding)
    model.set_output_embeddings(nn.Identity())
    return model


def _bound(
    model: PreTrainedModel,
    target: HfModel,
    index: TensorIndex,
    records: Mapping[str, TensorRecord],
    directory: Path,
    packed: Mapping[str, PackedTensor],
) -> HfModel:
    """Return the head with its tensors, by parameters, and the target's modules."""
    match = TensorMatch(records, {})
    head = bind_checkpoint(model, index, target.dtype, directory, packed, match)
    model.get_input_embeddings().tokens = target.model.get_input_embeddings()
    model.set_output_embeddings(target.model.get_output_embeddings())
    return head


def _head_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the target's family for the single layer of the head."""
    own = copy.deepcopy(config)
    own.num_mtp_layers = 1
    for types, kind in (("layer_types", _ATTENTION), ("mlp_layer_types", None)):
        of_layers = getattr(own, types, None)
        if of_layers:
            of_head = getattr(own, f"mtp_{types}", None) or [kind or of_layers[-1]]
            setattr(own, f"mtp_{types}", list(of_head)[:1])
    return own.get_mtp_config()


def _by_parameter(
    own: Mapping[str, TensorRecord], target: HfModel, model: PreTrainedModel
) -> dict[str, TensorRecord]:
    """Return the head's tensors by the parameters of `model`.

    Checkpoints have several layouts; transformers' renamings lead to that of its MtpModel.
    """
    with parameters_on_meta():
        reference = MtpModel(model, 1)
    names = CurrentNames(reference, reference.get_weight_conversions(target.model))
    layers, _ = decoder_layers(model)
    decoder = layers.rpartition(".")[0]
    places = {
        "layers.0.mtp_block.": f"{layers}.0.",
        "layers.0.post_norm.": f"{decoder}.norm.",
        "shared_post_norm.": f"{decoder}.norm.",
        "layers.0.": f"{decoder}.embed_tokens.",
    }
    records = {}
    for old, record in own.items():
        name, _ = names.today(old)
        for start, place in places.items():
            if name.startswith(start):
                records[place + name.removeprefix(start)] = record
                break
    return records
