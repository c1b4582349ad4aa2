"""Config of a DFlash head: how its checkpoints are laid out, and whether one fits a target.

A head is a folder beside the target, config.json and safetensors, or a GGUF file (gguf_file.py).
Two layouts of folders are read:

    public (z-lab)                          transformers (muse_glimmer_assistant)
    architectures: DFlashDraftModel         model_type: muse_glimmer_assistant
    dflash_config: block_size,              block_size, mask_token_id, target_layer_ids
        mask_token_id, target_layer_ids
    fc.weight                               encoder.fc.weight
    hidden_norm.weight                      encoder.output_norm_enc.weight
    layers.I.input_layernorm.weight         the same from here on
    layers.I.self_attn.{q,k,v,o}_proj.weight, layers.I.self_attn.{q,k}_norm.weight
    layers.I.post_attention_layernorm.weight, layers.I.mlp.{gate,up,down}_proj.weight
    norm.weight

A DFlash 2 head (architectures: DFlash2DraftModel) is in the public layout, and has beside these
    dflash_config: conv_kernel_size, conv_group_size, selector_rank, selector_top_k
    layers.I.{attention_conv,mlp_conv}.{base_kernel,kernel_projection.weight}
    candidate_selector.{predecessor_codebook,successor_codebook,hidden_projection.weight}

The layers are those of Qwen3, with Qwen3's keys in config.json, whatever its model_type. fc is
[hidden, len(target_layer_ids) * hidden]. Embedding and output head are the target's; copies of them
in the file are ignored. `DFlashDraftModel.save_pretrained` writes the public layout.

Optional keys of dflash_config: input_embedding_scale, output_multiplier, final_logit_softcapping.
Optional keys beside it: num_target_layers and vocab_size, which must be the target's; layer_types,
sliding_window and use_sliding_window as of Qwen3; is_causal, whether the tokens of a block see
earlier ones alone, by default those of sliding layers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.config import config_faults
from backends.checkpoint.kinds import read_raw
from backends.checkpoint.layer_count import refuse_absurd_count
from backends.checkpoint.raw_config import refuse_nonsense
from backends.checkpoint.sizes import check_figures
from backends.contract.backend import UnsupportedModel
from backends.heads.kinds import DFLASH, DFLASH_FAMILY, OF_DFLASH2, head_kind
from backends.heads.target import HeadTarget
from offload.formats.tensors import CheckpointError

_SLIDING, _FULL = "sliding_attention", "full_attention"
_OF_LAYERS = (
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "head_dim hidden_act rms_norm_eps rope_theta rope_scaling rope_parameters attention_bias "
    "max_position_embeddings layer_types sliding_window use_sliding_window max_window_layers "
    "quantization_config dtype is_causal num_target_layers vocab_size"
).split()
"""Keys of config.json that describe the layers."""
_OF_BLOCKS = (
    "block_size mask_token_id target_layer_ids input_embedding_scale output_multiplier "
    "final_logit_softcapping"
).split()
_OTHER_HEADS = ("projector_type", "shift_label", "sample_from_anchor", "causal")
"""Keys of dflash_config that describe heads of another kind, unless they are false or "dflash"."""
_SECOND_VERSION = "dflash2"
"""Value of projector_type in such a head (NVIDIA/Model-Optimizer#2216)."""
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_MAX_BLOCK_SIZE = 256
UNKNOWN_SIZE = 1
"""Vocabulary of a head whose file does not say its target's."""


@dataclass(frozen=True)
class SecondVersion:
    """The part of a DFlash 2 head's config that DFlash lacks.

    Attributes:
        kernel_size: taps of a convolution.
        group_size: channels that share the part of a kernel that depends on the input.
        rank: numbers of a token in the selector's tables.
        top_k: candidates of a position.
    """

    kernel_size: int
    group_size: int
    rank: int
    top_k: int


@dataclass(frozen=True)
class BlockSettings:
    """The part of a head's config beside Qwen3's layers.

    Attributes:
        size: positions of a block: the pending token, then masked ones.
        target_layer_ids: layers of the target whose outputs the head takes, by index.
        windows: sliding window of each layer in tokens; None: it sees the whole context.
        looks_ahead: whether a block's tokens see later ones of it, by layer.
        embedding_scale: factor of the target's embedding; None: the target's own.
        logit_softcap: logits become softcap * tanh(logits / softcap).
        second: of a DFlash 2 head.
    """

    size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int | None, ...]
    looks_ahead: tuple[bool, ...]
    embedding_scale: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    second: SecondVersion | None = None

    @classmethod
    def of(cls, config: PreTrainedConfig) -> BlockSettings:
        """Return the settings in a config of `load_dflash_config`."""
        block, types = config.dflash_config, config.layer_types
        is_causal = getattr(config, "is_causal", None)
        softcap = block.get("final_logit_softcapping")
        return cls(
            block["block_size"],
            block["mask_token_id"],
            tuple(block["target_layer_ids"]),
            tuple(config.sliding_window if kind == _SLIDING else None for kind in types),
            tuple(not (kind == _SLIDING if is_causal is None else is_causal) for kind in types),
            block.get("input_embedding_scale"),
            float(block.get("output_multiplier", 1.0)),
            float(softcap) if softcap else None,
            SecondVersion(*(block[name] for name in OF_DFLASH2))
            if _is_second_version(block)
            else None,
        )


def load_dflash_config(directory: Path) -> PreTrainedConfig:
    """Read the config of a DFlash head, in either layout, as a Qwen3Config with `dflash_config`.

    Raises UnsupportedModel for heads of another kind, CheckpointError for values that cannot be.
    """
    if head_kind(directory) != DFLASH:
        raise UnsupportedModel(f"{directory} is no DFlash head")
    with config_faults(directory):
        raw = read_raw(directory)
        refuse_nonsense(directory)
        refuse_absurd_count(directory)
        config = _from_family(raw) if _is_of_family(raw) else _from_public(raw, directory)
        check_figures(config)
        check_block(config, f"{directory}/config.json")
    return config


def check_fits(path: Path, config: PreTrainedConfig, target: HeadTarget) -> None:
    """Raise UnsupportedModel, with the reason, for a head of another target."""
    block, vocab_size = BlockSettings.of(config), target.vocab_size
    n_layers, last = getattr(config, "num_target_layers", None), max(block.target_layer_ids)
    n_tokens = vocab_size if config.vocab_size == UNKNOWN_SIZE else config.vocab_size
    reason = ""
    if config.hidden_size != target.hidden_size:
        reason = (
            f"it takes hidden states of {config.hidden_size} numbers, the target's have "
            f"{target.hidden_size}"
        )
    elif n_layers not in (None, target.n_layers):
        reason = f"its target has {n_layers} layers, this one {target.n_layers}"
    elif last >= target.n_layers:
        reason = f"it takes layer {last}, the target has {target.n_layers} layers"
    elif n_tokens != vocab_size:
        reason = f"its target has {n_tokens} tokens, this one {vocab_size}"
    elif block.second is not None and block.second.top_k > vocab_size:
        reason = f"it has {block.second.top_k} candidates, the target has {vocab_size} tokens"
    elif block.mask_token_id >= vocab_size:
        reason = f"its mask is token {block.mask_token_id}, the target has {vocab_size} tokens"
    if reason:
        raise UnsupportedModel(
            f"{path} is the draft head of another target: {reason}: name a head of this one"
        )


def _is_of_family(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == DFLASH_FAMILY


def _from_public(raw: Mapping[str, Any], directory: Path) -> PreTrainedConfig:
    block = raw.get("dflash_config") or {}
    known = (None, False, DFLASH, _SECOND_VERSION if _is_second_version(block) else DFLASH)
    for name in _OTHER_HEADS:
        if block.get(name) not in known:
            raise UnsupportedModel(
                f"{directory} is a draft head of another kind: its dflash_config has {name} of "
                f"{block[name]!r:.40}"
            )
    own = {key: block[key] for key in OF_DFLASH2 if key in block}
    return qwen3_config(raw, own | {key: block.get(key, raw.get(key)) for key in _OF_BLOCKS})


def _is_second_version(block: Mapping[str, Any]) -> bool:
    return any(name in block for name in OF_DFLASH2)


def _from_family(raw: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of transformers' layout: its blocks look ahead in every layer, and its
    windows are one token longer (sliding_window_bidirectional_overlay)."""
    types = raw.get("layer_types") or [_SLIDING] * int(raw["num_hidden_layers"])
    changed = {"layer_types": types, "is_causal": False, "use_sliding_window": _SLIDING in types}
    window = raw.get("sliding_window")
    if window is not None:
        changed["sliding_window"] = int(window) + 1
    return qwen3_config({**raw, **changed}, {key: raw.get(key) for key in _OF_BLOCKS})


def qwen3_config(raw: Mapping[str, Any], block: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the config of a head: Qwen3's keys of its layers, and those of `dflash_config`."""
    own = {key: raw[key] for key in _OF_LAYERS if raw.get(key) is not None}
    own = {"vocab_size": UNKNOWN_SIZE, **own, "tie_word_embeddings": False}
    config: PreTrainedConfig = Qwen3Config.from_dict(own)
    config.dflash_config = {key: value for key, value in block.items() if value is not None}
    return config


def check_block(config: PreTrainedConfig, place: str) -> None:
    """Raise CheckpointError for blocks that cannot be run; place: where they are described."""
    block = config.dflash_config
    size, mask, layers = (
        block.get(key) for key in ("block_size", "mask_token_id", "target_layer_ids")
    )
    problem = ""
    if type(size) is not int or not 2 <= size <= _MAX_BLOCK_SIZE:
        problem = f"block_size is {size!r:.40}, must be a number from 2 to {_MAX_BLOCK_SIZE}"
    elif type(mask) is not int or mask < 0:
        problem = f"mask_token_id is {mask!r:.40}, must be a token's id"
    elif not _are_layers(layers):
        problem = f"target_layer_ids is {layers!r:.60}, must be a list of layers, each once"
    elif not _are_numbers(block, _SCALES):
        problem = f"{', '.join(_SCALES)} must be positive numbers"
    elif _is_second_version(block) and not _are_counts(block, OF_DFLASH2):
        problem = f"a DFlash 2 head needs whole numbers from 1 for {', '.join(OF_DFLASH2)}"
    elif _is_second_version(block) and config.hidden_size % block["conv_group_size"]:
        size, width = block["conv_group_size"], config.hidden_size
        problem = f"conv_group_size is {size}, which does not divide the {width} channels"
    elif any(window is not None and window < size for window in BlockSettings.of(config).windows):
        problem = f"a block of {size} tokens is longer than the window of a layer"
    if problem:
        raise CheckpointError(f"{place}: {problem}: fix it, or download the head again")


def _are_counts(block: Mapping[str, Any], names: Iterable[str]) -> bool:
    return all(type(block.get(name)) is int and block[name] > 0 for name in names)


def _are_numbers(block: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Return whether all are positive numbers, where they are set."""
    values = [block[name] for name in names if block.get(name)]
    return all(type(value) in (int, float) and 0 < value < math.inf for value in values)


def _are_layers(value: Any) -> bool:
    if not isinstance(value, list) or not value or len(value) != len(set(map(str, value))):
        return False
    return all(type(item) is int and item >= 0 for item in value)
