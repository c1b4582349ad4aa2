"""transformers' class for a config, and the language model inside of a vision or audio wrapper.

A wrapper (`...ForConditionalGeneration`) keeps the language model's figures in `text_config`, and
its weights beside those of towers for images or sound, which are never read.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import PrefixChange, get_checkpoint_conversion_mapping
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from backends.contract.backend import UnsupportedModel


def architecture_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that transformers runs a config with. Raises UnsupportedModel."""
    config = _runnable(config)
    return _auto_class(config)._model_mapping[type(config)]


def attentive_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class whose module has the attention: of a wrapper, that of its language model."""
    own = type(language_config(config))
    return MODEL_MAPPING[own] if own in MODEL_MAPPING else architecture_of(config)


def new_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the model of a config, with the options of `from_config`; of a wrapper, its language
    model alone."""
    config = _runnable(config)
    model: PreTrainedModel = _auto_class(config).from_config(config, **options)
    if language_config(model.config) is not model.config:
        _drop_towers(model)
    if sparse_limit(language_config(model.config)) is not None:
        _drop_indexers(model)
    return model


def sparse_limit(config: PreTrainedConfig) -> int | None:
    """Return how many tokens sparse attention attends to; None for attention to all.

    Up to this length of the context it attends to all tokens, and its indexer decides nothing.
    """
    tokens, blocks, size = (
        getattr(config, name, None) if hasattr(type(config), name) else None
        for name in ("index_topk", "index_topk_blocks", "index_block_size")
    )
    limit = tokens or (blocks and size and blocks * size)
    return int(limit) if limit else None


class AllTokens(nn.Module):
    """An indexer of sparse attention that selects every token: its result is not looked at."""

    def forward(self, *args: object, **kwargs: object) -> str:
        return "all"


def _drop_indexers(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "indexer", None), nn.Module):
            module.indexer = AllTokens()


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a config that describes the language model: all of it, or a wrapper's."""
    return config.get_text_config(decoder=True)


def _runnable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a wrapper's text config if transformers loads the wrapper's checkpoints into the
    language model's own class; else the config itself."""
    text = language_config(config)
    if text is config or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    changes = get_checkpoint_conversion_mapping(text.model_type) or ()
    if not any(isinstance(change, PrefixChange) for change in changes):
        return config
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is not None:
        text.quantization_config = quantisation
    # Ties without effect where the checkpoint has a head of its own (matching.py).
    text.tie_word_embeddings |= config.tie_word_embeddings
    return text


def _auto_class(config: PreTrainedConfig) -> Any:
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UnsupportedModel(f"{config.model_type} has no causal language model in this transformers")


def _drop_towers(model: PreTrainedModel) -> None:
    """Remove the modules beside the decoder and the head: no token of text reaches them."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    module: nn.Module = model
    while module is not decoder:
        inside = None
        for name, child in module.named_children():
            if any(part is decoder for part in child.modules()):
                inside = child
            elif child is not head:
                module._modules[name] = None
        if inside is None:
            raise UnsupportedModel(f"{model.config.model_type} has no decoder among its modules")
        module = inside
