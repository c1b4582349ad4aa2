"""Transformers configs: whether the model can run here, its context length and KV cache sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, __version__
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.architecture import architecture_of, language_config, sparse_limit
from backends.checkpoint.kinds import read_raw, refuse_other_kinds
from backends.checkpoint.layer_count import refuse_absurd_count
from backends.checkpoint.quantised import quantisation_of
from backends.checkpoint.raw_config import refuse_nonsense
from backends.checkpoint.sizes import check_figures
from backends.contract.backend import UnsupportedModel, one_line
from backends.recurrent.functions import is_mixer
from offload.errors import SpecdecError
from offload.formats.tensors import CheckpointError

_REMEDY = "fix it, or download the checkpoint again"
_VALIDATOR = re.compile(r"^(Class v|V)alidation error for (validator|field) '\w*': \w+: ")
"""Beginning of huggingface_hub's message, before the sentence of a check."""
_CHUNKED, _INDEXED = "chunked_attention", "indexed_attention"
KNOWN_LAYERS = frozenset(
    "full_attention sliding_attention chunked_attention attention indexed_attention "
    "linear_attention conv mamba hybrid mlp moe".split()
)
"""Layer types of configs that can be streamed and rolled back."""
_OF_CALLS = {
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": True,
}
"""Options of the forward call that some config.json set, and the values that we need."""
# Families whose masks, biases or position embeddings use the row in the cache, which for the nodes
# of a tree is not their position.
_POSITION_BY_ROW = "it takes a row's place for its position"
_REFUSED = {
    **dict.fromkeys(("gpt_neo", "mpt", "trocr"), _POSITION_BY_ROW),
    "glm5_next_text": "its sparse attention may leave out the newest tokens, for any length",
    "minimax": "its lightning attention keeps a state of a kind of its own; take a GGUF file of it",
}
"""Families that are refused by name, and why."""
# RoPE types whose factors depend on the longest position of a pass, so a token's logits would
# depend on what else is verified with it; below the original length they do not.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def load_config(directory: Path) -> PreTrainedConfig:
    """Read config.json without running the checkpoint's own code; refuse models that cannot run.

    Its values are checked before anything is built from them.

    Raises CheckpointError and UnsupportedModel.
    """
    refuse_other_kinds(directory)
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"{directory} has no config.json: not a model directory")
    with config_faults(directory):
        refuse_nonsense(directory)
        refuse_absurd_count(directory)
    try:
        # Explicit False: else transformers asks on the terminal, and runs the code after a "y".
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds for a bad config
        raise CheckpointError(_fault(directory, error)) from error
    with config_faults(directory):
        _refuse_config(config)
        if getattr(language_config(config), "per_layer_attributes", None):
            language_config(config).allow_global_per_layer_attribute_access = True
        check_figures(language_config(config))
        for part in {id(part): part for part in (config, language_config(config))}.values():
            _set_for_inference(part)
    return config


def _fault(directory: Path, error: Exception) -> str:
    """Return what is wrong with a config.json that transformers refused."""
    path = directory / "config.json"
    raw = read_raw(directory)
    kind = raw.get("model_type")
    if kind is None:
        return f"{path} has no model_type, which names the model's family: {_REMEDY}"
    if kind not in CONFIG_MAPPING and "auto_map" in raw:
        return (
            f"{path}: the family {kind} is defined by code in the checkpoint, which specdec never "
            "runs: take a GGUF file of the model"
        )
    if kind not in CONFIG_MAPPING:
        return (
            f"{path}: the family {kind} (model_type) is not known to transformers {__version__}: "
            "a newer version may know it, or a GGUF file of the model may run"
        )
    return f"{path} cannot be read: {_VALIDATOR.sub('', one_line(error))}: {_REMEDY}"


def _set_for_inference(config: PreTrainedConfig) -> None:
    """Set the options of a forward call and set dropout to 0: torch refuses an invalid dropout
    probability even in inference."""
    for name, value in _OF_CALLS.items():
        setattr(config, name, value)
    for name, value in vars(config).items():
        if "drop" in name and type(value) in (int, float):
            setattr(config, name, 0.0)


@contextmanager
def config_faults(directory: Path) -> Iterator[None]:
    """Turn any exception caused by a config.json into CheckpointError.

    For the code from reading a config to building its model on the meta device: every value may be
    of any type, in families that were never tested, and only the config and the headers can be at
    fault. `--debug` shows where it happened.
    """
    try:
        yield
    except SpecdecError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{directory}/config.json describes no model that can be run ({type(error).__name__}: "
            f"{one_line(error)}): {_REMEDY}"
        ) from error


def _refuse_config(whole: PreTrainedConfig) -> None:
    kind = whole.model_type
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder-decoder: specdec runs causal decoders only")
    architecture = architecture_of(whole)
    quantisation_of(whole)
    config = language_config(whole)
    if not getattr(config, "num_hidden_layers", 0):
        raise CheckpointError(f"the {kind} config has no layers")
    if config.model_type in _REFUSED:
        raise UnsupportedModel(f"{kind} is not supported: {_REFUSED[config.model_type]}")
    other = set(getattr(config, "layer_types", None) or ()) - KNOWN_LAYERS
    if other:
        raise UnsupportedModel(f"{kind} has {', '.join(sorted(other))} layers: no KV rollback")
    if _INDEXED in (getattr(config, "layer_types", None) or ()) and sparse_limit(config) is None:
        raise UnsupportedModel(
            f"{kind} has sparse attention, and its config does not say to how many tokens it "
            "attends"
        )
    if getattr(config, "alibi", False) and kind != "bloom":
        raise UnsupportedModel(f"{kind} with ALiBi positions is not supported")
    if "past_key_values" not in signature(architecture.forward).parameters:
        raise UnsupportedModel(f"{kind} keeps no keys and values: its passes cannot be rolled back")


def context_limit(config: PreTrainedConfig) -> int:
    """Return the maximum number of positions whose logits do not depend on the batch."""
    limit: Any = getattr(config, "max_position_embeddings", None)
    limit = limit or getattr(config, "seq_length", 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        limit = rope.get("original_max_position_embeddings") or limit
    return min(int(limit), *(int(n or limit) for n in _attended(config)))


def _attended(config: PreTrainedConfig) -> Iterator[int]:
    """Yield the lengths up to which attention that leaves tokens out attends to all of them."""
    yield sparse_limit(config) or 0
    if _CHUNKED in (getattr(config, "layer_types", None) or ()):
        yield config.attention_chunk_size
    if getattr(config, "attn_temperature_tuning", False):  # Llama 4: from here on queries grow
        yield int(config.floor_scale) - 1
    yield declared(config, "keep_window_size") or 0  # Doge's dynamic mask


def is_attention(module: nn.Module) -> bool:
    """Return whether a module attends to keys and values, as the name of its class says."""
    name = type(module).__name__
    return "Attention" in name and not name.endswith("Layer") and not is_mixer(module)


class KvHeads(NamedTuple):
    """Heads of the keys or of the values that a decoder layer caches."""

    n_heads: int
    dim: int

    @property
    def n_values(self) -> int:
        """Numbers of one token."""
        return self.n_heads * self.dim


NO_HEADS = KvHeads(0, 0)


def kv_heads(config: PreTrainedConfig, layer: nn.Module) -> tuple[KvHeads, KvHeads]:
    """Return the heads of keys and of values that the KV cache of a decoder layer has per token.

    Multi-head latent attention caches its compressed latent and the shared rotary key
    (DeepSeek-V2, section 2.1); other attention a key and a value for every KV head.
    """
    attention = [module for module in layer.modules() if is_attention(module)]
    if all(getattr(module, "is_kv_shared_layer", False) for module in attention):
        return NO_HEADS, NO_HEADS  # without attention, or with those of an earlier layer
    latent = declared(config, "kv_lora_rank")
    if latent:  # layers may differ in both
        rank = getattr(attention[0], "kv_lora_rank", latent)
        rotary_dim = getattr(attention[0], "qk_rope_head_dim", config.qk_rope_head_dim)
        return KvHeads(1, int(rank)), KvHeads(1, int(rotary_dim))
    modules = {name.rpartition(".")[2]: module for name, module in layer.named_modules()}
    kv_projections = (modules.get(name) for name in ("k_proj", "v_proj"))
    projections = [module for module in kv_projections if isinstance(module, nn.Linear)]
    if projections and modules.get("v_proj") is None:  # values are computed from keys (Gemma 4)
        projections *= 2
    if len(projections) == 2:
        n_heads = head_shape(config, layer).n_kv_heads
        keys, values = (KvHeads(n_heads, int(x.out_features) // n_heads) for x in projections)
        return keys, values
    head_dims = (getattr(module, "head_dim", None) for module in modules.values())
    heads = config.num_attention_heads
    head_dim = next(filter(None, head_dims), None) or declared(config, "head_dim")
    n_heads = cached_heads(config, attention[0]) if attention else heads
    own = KvHeads(int(n_heads), int(head_dim or config.hidden_size // heads))
    return own, own


@dataclass(frozen=True)
class HeadShape:
    """Head counts and dims of attention; for latent attention, of the expanded keys and values."""

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int


def head_shape(config: PreTrainedConfig, layer: nn.Module) -> HeadShape:
    """Return the heads of a decoder layer; the config's where its attention does not say."""
    heads = int(config.num_attention_heads)
    if declared(config, "kv_lora_rank"):
        key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        return HeadShape(heads, heads, int(key_dim), int(config.v_head_dim))
    attention = next(filter(is_attention, layer.modules()), None)
    own_dim = getattr(attention, "head_dim", None) or declared(config, "head_dim")
    dim = int(own_dim or config.hidden_size // heads)
    key, groups = getattr(attention, "k_proj", None), getattr(attention, "num_key_value_groups", 0)
    if isinstance(key, nn.Linear) and groups:
        n_kv_heads = key.out_features // dim
        return HeadShape(n_kv_heads * groups, n_kv_heads, dim, dim)
    return HeadShape(heads, cached_heads(config, attention), dim, dim)


def cached_heads(config: PreTrainedConfig, attention: nn.Module | None) -> int:
    """Return the number of KV heads that are cached where the config's figures decide."""
    repeats = declared(config, "new_decoder_architecture")  # Falcon: keys, before it caches them
    if getattr(attention, "multi_query", False) and not repeats:
        return 1
    return int(declared(config, "num_key_value_heads") or config.num_attention_heads)


def declared(config: PreTrainedConfig, name: str) -> Any:
    """Return an option that the config's family declares; None for any other in config.json."""
    return getattr(config, name, None) if hasattr(type(config), name) else None
