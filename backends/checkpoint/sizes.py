"""Figures of a config as transformers understood it, that memory is planned by.

raw_config looks at what stands in the file; what a family makes of it, and what it has by default,
is known only afterwards.
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
_REMEDY = "mend the config.json, or download the checkpoint again"


def check_figures(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel for a figure that each layer has of its own, CheckpointError for what
    is no number."""
    kind = config.model_type
    for name in (*_NEEDED, *_OPTIONAL):
        value: Any = getattr(config, name, None)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, (list, tuple)):
            raise UnsupportedModel(
                f"{kind} is not supported: {name} is a list, a figure for each layer"
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
