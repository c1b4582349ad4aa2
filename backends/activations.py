"""How much memory a forward takes beside the weights and the KV cache.

Counted from the tensors that are alive together, as torch's profiler shows them: a test holds the
figures against it. Rows go through a layer in chunks, so the scores of one chunk count, not those
of the whole prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.configuration_utils import PreTrainedConfig

from backends.hf_model import HfModel
from backends.layer_runner import MAX_MASK_BYTES
from backends.torch_backend import CHUNK_ROWS

_FLOAT32 = 4
_CUSTOM_SCORE_BYTES = 16
"""Of attention code that is a model's own: it may keep four float32 copies of the scores alive."""


@dataclass(frozen=True)
class _Attention:
    """What attention allocates: per (head, query, key), and per key."""

    score_bytes: int
    key_bytes: int


def activation_bytes(model: HfModel, ctx_size: int, max_rows: int) -> int:
    """Most memory of a forward of a prompt of `ctx_size` tokens, or of `max_rows` nodes."""
    config, itemsize = model.config, model.dtype.itemsize
    feed_forward = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    # Embeddings, a layer's input and what it has put out so far; the last two are then joined.
    hidden = max(ctx_size, max_rows) * config.hidden_size * itemsize
    rotary = 2 * ctx_size * _head_dim(config) * itemsize
    chunk = CHUNK_ROWS * (8 * config.hidden_size + 3 * feed_forward) * itemsize
    kind = _attention(model)
    scores = kind.score_bytes * config.num_attention_heads * CHUNK_ROWS * ctx_size
    layer = chunk + scores + kind.key_bytes * ctx_size
    logits = max_rows * model.vocab_size * (itemsize + 2 * _FLOAT32)
    masks = _mask_bytes(config, ctx_size, itemsize)
    return rotary + masks + logits + 3 * hidden + max(layer, hidden)


def _attention(model: HfModel) -> _Attention:
    config, itemsize = model.config, model.dtype.itemsize
    heads = config.num_attention_heads
    # Softmax in float32 converts its input, unless that is float32 already.
    widened = 0 if itemsize == _FLOAT32 else _FLOAT32
    latent = _latent_attention(config, itemsize, widened)
    if latent is not None:
        return latent
    copies = 2 * heads * _head_dim(config) * itemsize  # keys and values of every query head
    if config._attn_implementation != "eager":
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return _Attention(0, copies if kv_heads < heads else 0)
    is_standard = type(model.model)._supports_attention_backend
    score_bytes = itemsize + widened + _FLOAT32 if is_standard else _CUSTOM_SCORE_BYTES
    return _Attention(score_bytes, copies)


def _mask_bytes(config: PreTrainedConfig, ctx_size: int, itemsize: int) -> int:
    """Masks are kept for all layers up to a limit; one more is being made, from booleans."""
    kinds = len(set(getattr(config, "layer_types", None) or [""]))
    one_chunk = CHUNK_ROWS * ctx_size
    triangle = ctx_size * (ctx_size + CHUNK_ROWS) // 2 * kinds
    return min(MAX_MASK_BYTES + one_chunk * itemsize, triangle * itemsize) + one_chunk


def _latent_attention(config: PreTrainedConfig, itemsize: int, widened: int) -> _Attention | None:
    """Of multi-head latent attention, whose keys and values are expanded for every chunk.

    Keys wider than values are nothing for the fused kernel: the plain one computes in float32, on
    copies of keys and values, and holds scores, probabilities and a byte of masking.
    """
    if not getattr(config, "kv_lora_rank", None):
        return None
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    key = nope + config.qk_rope_head_dim
    expanded = (nope + value + key) * itemsize
    if key == value:
        return _Attention(0, config.num_attention_heads * expanded)
    converted = (key + value) * widened or key * _FLOAT32  # keys are scaled in any case
    return _Attention(2 * _FLOAT32 + 1, config.num_attention_heads * (expanded + converted))


def _head_dim(config: PreTrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
