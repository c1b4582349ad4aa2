"""Configs of EAGLE-3 heads: config.json as SafeAILab, SpecForge and speculators write it, and the
metadata of GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from backends.checkpoint.config import config_faults
from backends.checkpoint.kinds import read_raw
from backends.checkpoint.raw_config import refuse_nonsense
from backends.checkpoint.sizes import check_figures
from backends.contract.backend import UnsupportedModel, one_line
from backends.heads.kinds import EAGLE3
from backends.heads.target import HeadTarget
from offload.errors import SpecdecError
from offload.formats.gguf_header import GgufMetadata
from offload.formats.tensors import CheckpointError

EAGLE3_CLASS = "LlamaForCausalLMEagle3"
"""The class that SpecForge's configs name."""
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_LAYER_KEYS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
    "max_position_embeddings rms_norm_eps rope_parameters rope_scaling rope_theta attention_bias "
    "mlp_bias vocab_size"
).split()
"""Keys of the head's layer, which is one of Llama."""
_REMEDY = "take the head that was made for this model"


@dataclass(frozen=True)
class Eagle3Config:
    """A head, as its file describes it."""

    layer: LlamaConfig
    """The head's layer; the vocabulary is the target's."""
    target_hidden_size: int
    layer_inputs: tuple[int, ...] | None = None
    """Layers of the target whose *inputs* the head takes; None: the default."""
    norm_before_residual: bool = False
    """Whether the hidden state is normed before the residual branches off (speculators)."""
    norm_before_fc: bool = False
    """Whether the target's states are normed together before `fc` (EAGLE-3.1)."""
    fc_norm: bool = False
    """Whether the target's states are normed one by one before `fc`."""
    norm_output: bool = False
    """Whether the state that the head goes on from is the normed one."""

    def layers_for(self, target: HeadTarget, path: Path) -> tuple[int, ...]:
        """Return the layers of the target whose outputs the head takes.

        Raises UnsupportedModel if the head does not fit the target.
        """
        pairs = {
            "hidden states of {} numbers": (self.target_hidden_size, target.hidden_size),
            "a vocabulary of {}": (self.layer.vocab_size, target.vocab_size),
        }
        for kind, (own, of_target) in pairs.items():
            if own != of_target:
                raise UnsupportedModel(
                    f"{path} is a head for {kind.format(own)}, and the target has {of_target}: "
                    f"{_REMEDY}"
                )
        n_layers = target.n_layers
        inputs = self.layer_inputs or (2, n_layers // 2, n_layers - 3)
        if not all(1 <= layer <= n_layers for layer in inputs):
            raise UnsupportedModel(
                f"{path} is a head for the states before the layers {list(inputs)}, of which the "
                f"target has 1 to {n_layers}: {_REMEDY}"
            )
        return tuple(layer - 1 for layer in inputs)


def read_config(directory: Path) -> Eagle3Config:
    """Read the config.json of a head.

    Raises CheckpointError for values that are invalid, UnsupportedModel for other kinds of heads.
    """
    raw = read_raw(directory)
    with config_faults(directory):
        refuse_nonsense(directory)
        nested = raw.get("eagle_config") or {}
        layer = {**raw, **(raw.get("transformer_layer_config") or {})}
        _refuse_other_heads(directory, {**nested, **layer})
        config = LlamaConfig(
            **{key: layer[key] for key in _LAYER_KEYS if layer.get(key) is not None},
            num_hidden_layers=1,
        )
        check_figures(config)
        flags = {
            name: bool(nested.get(name, raw.get(name, False)))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        }
        width = raw.get("target_hidden_size") or config.hidden_size
        return Eagle3Config(config, int(width), _layer_inputs(directory, raw, nested), **flags)


def _refuse_other_heads(directory: Path, config: Mapping[str, Any]) -> None:
    reasons = {
        "no layer or several": config.get("num_hidden_layers", 1) != 1,
        "the target's last state alone": config.get("use_aux_hidden_state", True) is False,
        "a sliding window": config.get("sliding_window") is not None
        and config.get("use_sliding_window") is not False,
        "quantised weights": config.get("quantization_config") is not None,
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if reason is not None:
        raise UnsupportedModel(
            f"{directory} is an EAGLE head with {reason}, which is not supported: name a draft "
            "model, or leave -md out"
        )


def _layer_inputs(
    directory: Path, raw: Mapping[str, Any], nested: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Return the layers whose inputs are taken.

    In `eagle_config` (SpecForge, SGLang) a layer stands for its output, at the top (speculators,
    vLLM) and in GGUF files for its input.
    """
    listed, shift = (nested[_LAYER_IDS], 1) if nested.get(_LAYER_IDS) else (raw.get(_LAYER_IDS), 0)
    if not listed:
        return None
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise CheckpointError(
            f"{directory}/config.json has {_LAYER_IDS} of {listed!r:.60}, must be a list of whole "
            "numbers: fix it, or download the head again"
        )
    return tuple(layer + shift for layer in listed)


def gguf_config(path: Path, metadata: GgufMetadata) -> Eagle3Config:
    """Return the config of a head in a GGUF file.

    Raises CheckpointError for values that are missing or invalid, UnsupportedModel for RoPE scaling
    other than by factors.
    """

    def value(key: str, default: Any = None) -> Any:
        name = f"{EAGLE3}.{key}"
        result = metadata.get(name, default)
        if result is None:
            raise CheckpointError(f"{path} has no {name}: convert the head again")
        return result

    scaling = value("rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModel(
            f"{path} is a head with {scaling} RoPE scaling, which is not supported in GGUF: take "
            "the head's safetensors"
        )
    if value("block_count") != 1:
        raise UnsupportedModel(f"{path} is an EAGLE head with several layers: name a draft model")
    try:
        head_count, width = value("attention.head_count"), value("embedding_length")
        n_tokens = metadata.array_length("tokenizer.ggml.tokens")
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=value("feed_forward_length"),
            num_attention_heads=head_count,
            num_key_value_heads=value("attention.head_count_kv", head_count),
            head_dim=value("attention.key_length", width // head_count),
            max_position_embeddings=value("context_length"),
            rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base", 1e4)},
            vocab_size=value("vocab_size", n_tokens),
            num_hidden_layers=1,
        )
        check_figures(config)
        layers = value("target_layers", value("extract_layers", []))
        return Eagle3Config(
            config,
            value("target_hidden_size"),
            tuple(int(layer) for layer in layers) or None,
            norm_before_residual=bool(value("norm_before_residual", False)),
            norm_before_fc=bool(value("norm_before_fc", False)),
        )
    except SpecdecError:
        raise
    except Exception as error:  # a value may be of any type
        raise CheckpointError(
            f"{path} describes no head that can be run ({one_line(error)}): convert the head again"
        ) from error
