"""The metadata values of a GGUF model that decide its memory, each checked against a range.

llama.cpp aborts the process on some invalid values, so they are refused here first.
Keys are `<architecture>.<name>`, as in llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from backends.contract.backend import UnsupportedModel
from offload.formats.gguf_header import GgufError, GgufMetadata, row_bytes

MAX_LAYERS = 1024
MAX_HEADS = 2**14
MAX_HEAD_SIZE = 2**14
MAX_HIDDEN_SIZE = 2**20
MAX_CONTEXT = 2**31 - 1
MAX_EXPERTS = 2**14

# llama.cpp refuses these without rotated dimensions; others may have none.
_ALWAYS_ROTATED = ("llama", "deci", "falcon")
# For these it ends the process if not all of a head's dimensions are rotated, or keys are longer
# than values: tested ones, or those whose graph says so (src/models); there may be more.
_WHOLLY_ROTATED = frozenset(
    "qwen2 qwen2moe qwen3 qwen3moe granite granitemoe ernie4_5 mistral3 grovemoe bitnet".split()
)

_REMEDY = "the file is damaged, download it again"

CACHE_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
"""Names of the KV cache's types -> names of ggml's types."""


@dataclass(frozen=True)
class Keys:
    """The metadata of one architecture."""

    path: Path
    metadata: GgufMetadata
    architecture: str

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def __contains__(self, key: str) -> bool:
        return self.full(key) in self.metadata

    def any_below(self, *prefixes: str) -> bool:
        """Return whether a key with one of these prefixes ("ssm.") has a value other than zero."""
        starts = tuple(self.full(prefix) for prefix in prefixes)
        values = (self.metadata[key] for key in self.metadata if key.startswith(starts))
        return any(any(value) if isinstance(value, list) else value for value in values)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return the value of `key`, low to high; `default` if it is missing (None: an error)."""
        if key not in self:
            if default is None:
                raise GgufError(f"{self.path} has no {self.full(key)}: it is no complete model")
            return default
        if self.metadata.array_length(self.full(key)) is not None:
            raise GgufError(f"{self.path} has a list in {self.full(key)}, not one number")
        return self._check(key, self.metadata[self.full(key)], low, high)

    def per_layer(
        self, key: str, n_layers: int, high: int, default: Iterable[int] | None = None
    ) -> tuple[int, ...]:
        """Return the values of `key` per layer, 0 to high, from a list or one number for all."""
        length = self.metadata.array_length(self.full(key))
        if length is None:
            if key not in self and default is not None:
                return tuple(default)
            return (self.integer(key, 0, high),) * n_layers
        if length != n_layers:
            raise GgufError(
                f"{self.path} has {length} values in {self.full(key)} for {n_layers} layers"
            )
        values = cast(list[object], self.metadata[self.full(key)])
        return tuple(self._check(key, value, 0, high) for value in values)

    def _check(self, key: str, value: object, low: int, high: int) -> int:
        # bool is an int: a list of flags is read as zeros and ones.
        if not isinstance(value, int) or not low <= value <= high:
            shown = str(value) if isinstance(value, int) else repr(value)[:40]
            raise GgufError(
                f"{self.path} has {self.full(key)} of {shown}; "
                f"{low if low == high else f'{low} to {high}'} "
                f"{'is' if low == high else 'are'} accepted: {_REMEDY}"
            )
        return int(value)


@dataclass(frozen=True)
class KvLayer:
    """KV cache of one layer per token: `n_heads` keys and as many values of these lengths."""

    n_heads: int  # 0 in layers without attention, for which llama.cpp allocates memory anyway
    key_length: int
    value_length: int
    index_length: int = 0  # length of the additional key of a sparse-attention indexer


@dataclass(frozen=True)
class KvShape:
    """The KV cache of a model; layers without one are left out."""

    layers: tuple[KvLayer, ...] = field(default=())

    def bytes_per_token(self, type_k: str, type_v: str, *, flash_attention: bool = False) -> int:
        """Return bytes of one token's keys and values, in full length for every layer.

        Without flash attention llama.cpp stores values transposed and allocates the largest width
        for each layer, which this counts; quantized values need flash attention.

        Raises:
            ValueError: an unknown type.
            GgufError: the type's blocks do not fit the heads' lengths.
        """
        for name in (type_k, type_v):
            if name not in CACHE_TYPES:
                raise ValueError(f"{name!r} is no KV cache type; use {', '.join(CACHE_TYPES)}")
        padded = not flash_attention and not type_v.startswith("q")
        widest = max((x.n_heads * x.value_length for x in self.layers), default=0)
        total = 0
        for x in self.layers:
            total += _cache_bytes(type_k, x.n_heads, x.key_length)
            total += _cache_bytes(type_k, 1, x.index_length)
            if x.value_length:
                total += (
                    _cache_bytes(type_v, 1, widest)
                    if padded
                    else _cache_bytes(type_v, x.n_heads, x.value_length)
                )
        return total


def refuse_cache_type(*names: str | None) -> None:
    """Raise UnsupportedModel for a number format of the KV cache that llama.cpp lacks."""
    for name in names:
        if name is not None and name not in CACHE_TYPES:
            raise UnsupportedModel(
                f"the KV cache of a GGUF model cannot be {name}, which is for checkpoints: use "
                "q8_0, q4_0, f16 or bf16"
            )


def _cache_bytes(cache_type: str, n_heads: int, length: int) -> int:
    try:
        return n_heads * row_bytes(CACHE_TYPES[cache_type], length)
    except ValueError as error:
        raise GgufError(
            f"a KV cache of {cache_type} cannot hold heads of length {length} ({error}): use f16"
        ) from error


def check_epsilons(keys: Keys) -> None:
    """Raise GgufError for invalid epsilons of norms: the first pass would abort the process."""
    for norm in ("layer_norm", "layer_norm_rms", "group_norm"):
        key = keys.full(f"attention.{norm}_epsilon")
        value = keys.metadata.get(key, 0.0)
        if not isinstance(value, float) or not 0.0 <= value < math.inf:
            raise GgufError(
                f"{keys.path} has {key} of {str(value)[:40]}, which is no number of at least 0: "
                f"{_REMEDY}"
            )


def read_kv_shape(keys: Keys, n_layers: int, hidden_size: int, keeps_kv: list[bool]) -> KvShape:
    """Return the KV cache of the first `len(keeps_kv)` of `n_layers` layers.

    Args:
        n_layers: layer count of the file, including multi-token prediction layers.
        keeps_kv: whether a layer has attention (layers of hybrid models may have none).
    """
    heads = keys.per_layer("attention.head_count", n_layers, MAX_HEADS)
    kv_heads = keys.per_layer("attention.head_count_kv", n_layers, MAX_HEADS, heads)
    _check_heads(keys, heads, kv_heads, keeps_kv)
    size = hidden_size // next((n for n in heads if n), 1)
    lengths = [_lengths(keys, size, suffix) for suffix in ("", "_swa")]
    _check_rotation(keys, *lengths[0])
    windowed = _windowed_layers(keys, n_layers)
    index_length = keys.integer("attention.indexer.key_length", 0, MAX_HEAD_SIZE, 0)
    n_shared = keys.integer("attention.shared_kv_layers", 0, n_layers - 1, 0)
    layers = []
    for i, keeps in enumerate(keeps_kv):
        # The last layers of Gemma 3n and 4 use the cache of earlier layers.
        if not keeps or i >= n_layers - n_shared:
            continue
        options = lengths if windowed[i] is None else lengths[bool(windowed[i]) :][:1]
        key_length, value_length = (max(pair) for pair in zip(*options, strict=True))
        layers.append(KvLayer(kv_heads[i], key_length, value_length, index_length))
    return KvShape(tuple(layers))


def _check_heads(
    keys: Keys, heads: tuple[int, ...], kv_heads: tuple[int, ...], keeps_kv: list[bool]
) -> None:
    if any(keeps_kv) and not any(heads):
        raise GgufError(f"{keys.path} has {keys.full('attention.head_count')} of 0: {_REMEDY}")
    for i, (n, n_kv) in enumerate(zip(heads, kv_heads, strict=True)):
        if n and n_kv and (n_kv > n or n % n_kv):
            raise GgufError(
                f"{keys.path} has {n} attention heads for {n_kv} of keys and values in layer {i}, "
                "not a multiple: the file is damaged"
            )


def _check_rotation(keys: Keys, key_length: int, value_length: int) -> None:
    """Raise GgufError for RoPE settings on which llama.cpp aborts."""
    if keys.architecture in _ALWAYS_ROTATED:
        keys.integer("rope.dimension_count", 1, MAX_HEAD_SIZE, 1)
    if keys.architecture in _WHOLLY_ROTATED:
        keys.integer("rope.dimension_count", key_length, key_length, key_length)
        keys.integer("attention.value_length", key_length, key_length, value_length)
    for name in ("rope.freq_base", "rope.freq_base_swa"):
        base = keys.metadata.get(keys.full(name), 1.0)
        if not isinstance(base, float) or not 0.0 < base < math.inf:
            raise GgufError(
                f"{keys.path} has {keys.full(name)} of {str(base)[:40]}, which is no number above "
                f"0: {_REMEDY}"
            )


def _lengths(keys: Keys, head_size: int, suffix: str) -> tuple[int, int]:
    """Return the lengths of a key and a value; compressed (MLA) keys have no values."""
    if suffix and f"attention.key_length{suffix}" not in keys:
        return _lengths(keys, head_size, "")
    if head_size == 0 and "attention.key_length" not in keys:
        raise GgufError(
            f"{keys.path} has more attention heads than the hidden size has elements: it is damaged"
        )
    key = keys.integer(f"attention.key_length{suffix}", 1, MAX_HEAD_SIZE, head_size)
    value = keys.integer(f"attention.value_length{suffix}", 1, MAX_HEAD_SIZE, head_size)
    return key, 0 if f"attention.key_length_mla{suffix}" in keys else value


def _windowed_layers(keys: Keys, n_layers: int) -> tuple[bool | None, ...]:
    """Return which layers have the sliding window; None if the file leaves that to llama.cpp."""
    key = "attention.sliding_window_pattern"
    if keys.metadata.array_length(keys.full(key)) is None:
        return (None,) * n_layers
    return tuple(bool(flag) for flag in keys.per_layer(key, n_layers, 1))
