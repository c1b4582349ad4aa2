"""Activation memory of a forward pass: everything beside the weights and the KV cache.

Counts the tensors that are alive at the same time; a test compares the sums with torch's profiler.
Tokens go through a layer in chunks, so the scores of one chunk count, not those of the whole
prompt. On a GPU the kernels need other buffers, and logits are returned in the weights' dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.configuration_utils import PreTrainedConfig

from backends.attention.blocks import USUAL_LIMITS
from backends.attention.interface import KEYS_BY_ROW
from backends.attention.row_groups import BLOCK_KEYS, SPAN_BYTES
from backends.attention.scores import MAX_BLOCKED_SCORE_BYTES, value_width
from backends.attention.segments import MAX_SCORE_BYTES
from backends.attention.stored_rows import OWN_FORMATS, PART_BYTES
from backends.checkpoint.config import HeadShape
from backends.feedforward.linear import sum_bytes
from backends.hf.layer_runner import MAX_MASK_BYTES
from backends.hf.model import HfModel
from backends.hf.runner import CHUNK_TOKENS

_FLOAT32 = 4
_CUSTOM_SCORE_BYTES = 16
"""Bytes per score of a model's own attention code, which may keep four float32 copies alive."""
_MERGED_COPIES = 3
"""float32 outputs that are alive while two segments are merged: both, and the sum."""


_QUERIES_PER_BLOCK = 64
_BLOCKS_OF_SPLIT_KEYS = 1320
"""Maximum number of blocks of 64 queries in flash attention on a GPU: it splits long key sequences
until all multiprocessors (132) have work, in at most five steps of two blocks each, and keeps the
parts in float32 (FlashDecoding)."""


_GATHERED_COPIES = 2
"""Copies of a layer's keys and values: gathered in order, and a temporary while gathering, or as
they are stored."""


@dataclass(frozen=True)
class _Attention:
    """Bytes that attention with whole masks allocates: per (head, query, key), and per key."""

    score_bytes: int
    key_bytes: int


def activation_bytes(
    model: HfModel,
    ctx_size: int,
    max_num_tokens: int,
    *,
    on_gpu: bool = False,
    prompt_tokens: int | None = None,
) -> int:
    """Peak bytes of a pass over a prompt of `ctx_size` tokens, or over `max_num_tokens` nodes.

    prompt_tokens: maximum prompt tokens of a pass, where that is less than `ctx_size`.
    """
    prompt_tokens = ctx_size if prompt_tokens is None else min(prompt_tokens, ctx_size)
    config, itemsize = model.config, model.dtype.itemsize
    # Embeddings, a layer's input and its output so far; the chunks of output are then joined.
    hidden = max(prompt_tokens, max_num_tokens) * config.hidden_size * itemsize
    rotary = 2 * prompt_tokens * _head_dim(config) * itemsize
    chunk, experts = _chunk_bytes(model), _expert_bytes(model)
    logits = max_num_tokens * model.vocab_size * _logit_bytes(model, on_gpu)
    if model.takes_blocks and not on_gpu:
        attention = _blocked_bytes(model, ctx_size, max_num_tokens)
        masks = _blocked_mask_bytes(model, ctx_size, max_num_tokens)
    elif model.attention == KEYS_BY_ROW:
        attention = _segmented_bytes(model, ctx_size)
        masks = _segment_mask_bytes(model, ctx_size, max_num_tokens)
    else:
        kind = _attention(model)
        attention = kind.score_bytes * config.num_attention_heads * CHUNK_TOKENS * ctx_size
        attention += kind.key_bytes * ctx_size
        masks = _mask_bytes(config, ctx_size, itemsize)
    if on_gpu or not model.takes_whole_cache:
        attention += _GATHERED_COPIES * model.layer_kv_bytes * (ctx_size + max_num_tokens)
        attention += PART_BYTES if model.kv_formats != OWN_FORMATS else 0  # decoded at a time
    layer = 3 * hidden + max(chunk + max(attention, experts), hidden)
    return (
        rotary
        + masks
        + logits
        + max(layer, 2 * hidden + _last_norm_bytes(model, prompt_tokens, on_gpu))
    )


def _last_norm_bytes(model: HfModel, ctx_size: int, on_gpu: bool) -> int:
    """Bytes of the norm after the layers, which takes all rows at once, not by chunks: float32
    copies of its input, of the normed rows, and on a CPU of one step between (both measured)."""
    n_copies = 2 if on_gpu else 3
    return n_copies * ctx_size * model.config.hidden_size * _FLOAT32


def _chunk_bytes(model: HfModel) -> int:
    config = model.config
    listed = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    feed_forward = max(listed) if isinstance(listed, list | tuple) else listed
    cached = (8 * config.hidden_size + 3 * feed_forward) * model.dtype.itemsize
    n_sum_bytes = _FLOAT32 if model.packed_modules else sum_bytes(model.dtype)
    return int(CHUNK_TOKENS * (cached + feed_forward * n_sum_bytes))


def _expert_bytes(model: HfModel) -> int:
    """Bytes for the expert outputs of one chunk: plain and weighted, in the order of experts and of
    tokens, and their sum."""
    n_used = max((x.n_used for x in model.experts if x is not None), default=0)
    numbers = CHUNK_TOKENS * model.config.hidden_size
    return int(
        numbers * (n_used * (model.dtype.itemsize + 2 * _FLOAT32) + 2 * _FLOAT32 * bool(n_used))
    )


def _logit_bytes(model: HfModel, on_gpu: bool) -> int:
    """Bytes of one logit, including all copies that are alive at the same time."""
    if not on_gpu:
        return model.dtype.itemsize + 2 * _FLOAT32
    is_capped = getattr(model.config, "final_logit_softcapping", None) is not None
    return model.dtype.itemsize * (2 if is_capped else 1)


def _blocked_bytes(model: HfModel, ctx_size: int, max_num_tokens: int) -> int:
    """Bytes for exact attention (backends/attention/blocks.py), which computes in float32."""
    shapes = model.head_shapes
    return max((_blocked_bytes_of(model, x, ctx_size, max_num_tokens) for x in shapes), default=0)


def _blocked_bytes_of(model: HfModel, shape: HeadShape, ctx_size: int, max_num_tokens: int) -> int:
    config = model.config
    n_columns = _max_columns(ctx_size, max_num_tokens)
    width, n_group = value_width(shape.value_dim), shape.n_heads // shape.n_kv_heads
    keys_and_values = _FLOAT32 * shape.n_kv_heads * n_columns * (shape.key_dim + width)
    one_block = _FLOAT32 * USUAL_LIMITS.max_keys * (shape.key_dim + width)
    bytes_per_row = _FLOAT32 * n_columns
    num_rows = max(n_group, MAX_BLOCKED_SCORE_BYTES // bytes_per_row)
    num_rows = min(num_rows, CHUNK_TOKENS * shape.n_heads)
    rows = _FLOAT32 * num_rows * (shape.key_dim + width + shape.value_dim)
    output = CHUNK_TOKENS * shape.n_heads * shape.value_dim * model.dtype.itemsize
    dims = _latent_dims(config)
    expanded = ctx_size * shape.n_heads * dims.expanded * model.dtype.itemsize if dims else 0
    in_float32 = min(keys_and_values, max(SPAN_BYTES, one_block)) + num_rows * bytes_per_row + rows
    return in_float32 + output + expanded


def _max_columns(ctx_size: int, max_num_tokens: int) -> int:
    """Number of keys, including the padding of blocks on a path of `max_num_tokens` nodes."""
    return ctx_size + max_num_tokens + (1 + -(-max_num_tokens // BLOCK_KEYS)) * BLOCK_KEYS


def _blocked_mask_bytes(model: HfModel, ctx_size: int, max_num_tokens: int) -> int:
    """Bytes of the masks: one per (row, key) after the prefix's full blocks, two while built."""
    windows = {model.window(i) for i in range(len(model.layers))}
    edge = CHUNK_TOKENS if windows - {None} else 0
    n_chunks = -(-ctx_size // CHUNK_TOKENS)
    one_chunk = CHUNK_TOKENS * (CHUNK_TOKENS + 2 * BLOCK_KEYS + edge)
    tree = max_num_tokens * (max_num_tokens + 4 * BLOCK_KEYS + edge)
    return min(MAX_MASK_BYTES, len(windows) * max(n_chunks * one_chunk, tree)) + 2 * one_chunk


def _segmented_bytes(model: HfModel, ctx_size: int) -> int:
    """Bytes for segmented attention on a GPU (backends/attention/segments.py): the outputs, and the
    parts that flash attention merges."""
    return max((_segmented_bytes_of(model, x, ctx_size) for x in model.head_shapes), default=0)


def _segmented_bytes_of(model: HfModel, shape: HeadShape, ctx_size: int) -> int:
    config, itemsize = model.config, model.dtype.itemsize
    dims = _latent_dims(config)
    outputs = CHUNK_TOKENS * shape.n_heads * shape.value_dim * _FLOAT32 * _MERGED_COPIES
    n_keys = max(ctx_size - CHUNK_TOKENS, min(ctx_size, CHUNK_TOKENS))  # longest segment
    if getattr(config, "attn_logit_softcapping", None):
        scores = shape.n_heads * CHUNK_TOKENS * n_keys * _FLOAT32
        return outputs + 2 * min(scores, MAX_SCORE_BYTES)  # a second copy for their sum
    is_equal = shape.key_dim == shape.value_dim
    widened = 0 if is_equal else shape.n_kv_heads * max(shape.key_dim, shape.value_dim) * itemsize
    expanded = shape.n_heads * dims.expanded * itemsize if dims else 0
    merged = _BLOCKS_OF_SPLIT_KEYS * _QUERIES_PER_BLOCK * (shape.value_dim + 1) * _FLOAT32
    return outputs + widened * n_keys + expanded * ctx_size + merged


def _segment_mask_bytes(model: HfModel, ctx_size: int, max_num_tokens: int) -> int:
    """Bytes of the masks: of a tree, nodes x nodes; of a prompt, only where a window ends in it."""
    itemsize = model.dtype.itemsize
    windows = {model.window(i) for i in range(len(model.layers))}
    n_chunks = -(-ctx_size // CHUNK_TOKENS)
    one_chunk = CHUNK_TOKENS * max(max_num_tokens, 2 * CHUNK_TOKENS if windows - {None} else 0)
    tree = len(windows) * max_num_tokens * (max_num_tokens + 2 * CHUNK_TOKENS * (len(windows) > 1))
    prompt = len(windows - {None}) * n_chunks * one_chunk
    cached = min(MAX_MASK_BYTES, max(tree, prompt) * itemsize)
    return cached + one_chunk * (itemsize + 2)


def _attention(model: HfModel) -> _Attention:
    config, itemsize = model.config, model.dtype.itemsize
    heads = config.num_attention_heads
    # Softmax in float32 converts its input, unless that is float32 already.
    widened = 0 if itemsize == _FLOAT32 else _FLOAT32
    latent = _latent_attention(config, itemsize, widened)
    if latent is not None:
        return latent
    copies = 2 * heads * _head_dim(config) * itemsize  # keys and values of every query head
    if model.attention != "eager":
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return _Attention(0, copies if kv_heads < heads else 0)
    is_standard = type(model.model)._supports_attention_backend
    score_bytes = itemsize + widened + _FLOAT32 if is_standard else _CUSTOM_SCORE_BYTES
    return _Attention(score_bytes, copies)


def _mask_bytes(config: PreTrainedConfig, ctx_size: int, itemsize: int) -> int:
    """Bytes of the masks cached for all layers up to a limit, and of one more that is built."""
    kinds = len(set(getattr(config, "layer_types", None) or [""]))
    one_chunk = CHUNK_TOKENS * ctx_size
    triangle = ctx_size * (ctx_size + CHUNK_TOKENS) // 2 * kinds
    return min(MAX_MASK_BYTES + one_chunk * itemsize, triangle * itemsize) + one_chunk


@dataclass(frozen=True)
class _LatentDims:
    """Dimensions of multi-head latent attention, which expands keys and values per chunk."""

    key: int
    value: int
    expanded: int
    """Numbers per head and key: the expanded latent, and the assembled keys."""


def _latent_dims(config: PreTrainedConfig) -> _LatentDims | None:
    if not getattr(config, "kv_lora_rank", None):
        return None
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    key = nope + config.qk_rope_head_dim
    return _LatentDims(key, value, nope + value + key)


def _latent_attention(config: PreTrainedConfig, itemsize: int, widened: int) -> _Attention | None:
    """Bytes for latent attention. SDPA's fused kernel needs keys as wide as values: else the plain
    one runs in float32 on copies, with scores, probabilities and a byte of mask per key.
    """
    dims = _latent_dims(config)
    if dims is None:
        return None
    heads, expanded = config.num_attention_heads, dims.expanded * itemsize
    if dims.key == dims.value:
        return _Attention(0, heads * expanded)
    # Scaling the keys makes a copy even if nothing is converted.
    converted = (dims.key + dims.value) * widened or dims.key * _FLOAT32
    return _Attention(2 * _FLOAT32 + 1, heads * (expanded + converted))


def _head_dim(config: PreTrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
