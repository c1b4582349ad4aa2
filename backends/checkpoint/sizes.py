"""Checks of the config values that memory is planned by, after transformers has read them.

raw_config checks the file; defaults and derived values of a family are known only afterwards.
"""

from __future__ import annotations

from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from backends.contract.backend import UnsupportedModel
from offload.formats.tensors import CheckpointError

_NEEDED = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_OPTIONAL = (
    "head_dim intermediate_size kv_lora_rank max_position_embeddings "
    "num_key_value_heads num_nextn_predict_layers qk_nope_head_dim qk_rope_head_dim seq_length "
    "sliding_window v_head_dim"
).split()
_BY_LAYER = "intermediate_size"
"""Size that may differ among layers."""
_REMEDY = "fix the config.json, or download the checkpoint again"


def check_figures(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel for a size that differs among layers, CheckpointError for a value that
    is not a valid number."""
    kind = config.model_type
    for name in (*_NEEDED, *_OPTIONAL):
        value: Any = getattr(config, name, None)
        if value is None and name in _OPTIONAL:
            continue
        if name == _BY_LAYER and isinstance(value, (list, tuple)) and value:
            value = next((item for item in value if type(item) is not int or item < 1), value[0])
        if isinstance(value, (list, tuple)):
            raise UnsupportedModel(
                f"{kind} is not supported: {name} is a list, a value for each layer"
            )
        if type(value) is not int or value < (name in _NEEDED):
            minimum = int(name in _NEEDED)
            raise CheckpointError(
                f"the {kind} config has {name} of {value!r:.40}, must be a whole number of at "
                f"least {minimum}: {_REMEDY}"
            )
    if not getattr(config, "head_dim", None) and config.num_attention_heads > config.hidden_size:
        raise CheckpointError(
            f"the {kind} config has {config.num_attention_heads} attention heads for a hidden size "
            f"of {config.hidden_size}: {_REMEDY}"
        )
