"""Shapes of well-known models, and shapes of a wished size.

Only shapes: no weight of these models is used. Notation: D hidden size, F intermediate size,
N layers, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from offload.errors import SpecdecError
from offload.units import format_bytes


class SynthError(SpecdecError, ValueError):
    """A checkpoint cannot be grown as asked; the message says why and what would work."""


@dataclass(frozen=True)
class Experts:
    """The routed experts of each layer of a mixture."""

    n: int
    n_used: int  # for a token
    intermediate_size: int  # of one


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of one Llama, or of a mixture with the same attention (Qwen3-MoE)."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the output head is the embedding
    experts: Experts | None = None  # in the MLP's place

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        attention = 2 * self.hidden_size * self.head_dim * (self.n_heads + self.n_kv_heads)
        norms = 2 * self.hidden_size
        if self.experts is None:
            return attention + 3 * self.hidden_size * self.intermediate_size + norms
        expert = 3 * self.hidden_size * self.experts.intermediate_size
        routed = self.experts.n * (expert + self.hidden_size)  # with the router's row
        return attention + routed + norms + 2 * self.head_dim  # of queries and keys, too

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head is counted once."""
        tables = 1 if self.tied else 2
        return (
            self.n_layers * self.layer_parameters
            + tables * self.vocab_size * self.hidden_size
            + self.hidden_size  # the final norm
        )

    def n_bytes(self, bytes_per_weight: float = 2) -> int:
        """Bytes of all weights on disk, all stored alike."""
        return round(self.parameters * bytes_per_weight)

    def with_head_dim(self, head_dim: int) -> LlamaShape:
        """The same matrices cut into heads of another size.

        Heads of 64 become half as many of 128: parameters, FLOPs and KV bytes per token stay.
        """
        if head_dim == self.head_dim:
            return self
        if self.n_heads * self.head_dim % head_dim or self.n_kv_heads * self.head_dim % head_dim:
            raise SynthError(
                f"{self.n_kv_heads} key/value heads of {self.head_dim} cannot be cut into heads "
                f"of {head_dim}, the source's head dimension; choose another shape"
            )
        return replace(
            self,
            n_heads=self.n_heads * self.head_dim // head_dim,
            n_kv_heads=self.n_kv_heads * self.head_dim // head_dim,
            head_dim=head_dim,
        )

    def with_routing_of(self, source: LlamaShape) -> LlamaShape:
        """The same bytes of experts, cut into as many experts as the source has, of which a token
        takes as many as it takes there: routing is the source's. Raises SynthError."""
        if (self.experts is None) != (source.experts is None):
            kinds = {True: "dense", False: "a mixture of experts"}
            raise SynthError(
                f"the shape is {kinds[self.experts is None]} and the source "
                f"{kinds[source.experts is None]}: choose another --like, or another --from"
            )
        if self.experts is None or source.experts is None:
            return self
        size = self.experts.intermediate_size
        if self.experts.n != source.experts.n:
            size = self.experts.n * size // source.experts.n // _EXPERT_STEP * _EXPERT_STEP
        return replace(self, experts=replace(source.experts, intermediate_size=size))


class Storage(Protocol):
    """How a model's weights are stored."""

    @property
    def block_size(self) -> int:
        """Weights that are stored together, in most of its matrices."""

    def model_bytes(self, shape: LlamaShape) -> int:
        """Of all weights of a model of this shape."""


#                            D      F     N   H   K    E       V  tied
SHAPES: dict[str, LlamaShape] = {
    "llama-3.2-1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": LlamaShape(3072, 8192, 28, 24, 8, 128, 128_256, True),
    "llama-3-8b": LlamaShape(4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "llama-3-70b": LlamaShape(8192, 28_672, 80, 64, 8, 128, 128_256, False),
    "llama-2-7b": LlamaShape(4096, 11_008, 32, 32, 32, 128, 32_000, False),
    "llama-2-13b": LlamaShape(5120, 13_824, 40, 40, 40, 128, 32_000, False),
    "llama-2-70b": LlamaShape(8192, 28_672, 80, 64, 8, 128, 32_000, False),
}
#                             D      F    N   H   K   E       V   tied          n  used  F of one
MIXTURES: dict[str, LlamaShape] = {
    "qwen3-30b-a3b": LlamaShape(2048, 6144, 48, 32, 4, 128, 151_936, False, Experts(128, 8, 768)),
    "gpt-oss-20b": LlamaShape(2880, 2880, 24, 64, 8, 64, 201_088, False, Experts(32, 4, 2880)),
    "mixtral-8x7b": LlamaShape(4096, 14_336, 32, 32, 8, 128, 32_000, False, Experts(8, 2, 14_336)),
}
MAX_LAYERS = 1024  # of a GGUF file that is read, far above any real model
_EXPERT_STEP = 32  # of their intermediate sizes: the smallest block of a quantised row
_FFN_STEP = 64  # keeps rows aligned for every matmul kernel
_ROUNDS_OF_SIZING = 3  # formats differ from layer to layer, so a weight's mean bytes do with size


def named_shape(name: str) -> LlamaShape:
    """Returns a well-known shape.

    Raises:
        SynthError: the name is not in `SHAPES` or `MIXTURES`.
    """
    known = SHAPES | MIXTURES
    try:
        return known[name.lower()]
    except KeyError:
        raise SynthError(f"unknown shape {name!r}; known: {', '.join(known)}") from None


def shape_of_size(
    n_bytes: int,
    bytes_per_weight: float = 2,
    candidates: list[LlamaShape] | None = None,
    vocab_size: int | None = None,
    min_layers: int = 1,
    min_intermediate_size: int = 1,
    width_step: int = _FFN_STEP,
) -> LlamaShape:
    """Adjusts a shape's layers, then its MLP width, so that all weights take about `n_bytes`.

    Args:
        n_bytes: the wished size of the weights.
        bytes_per_weight: 2 for bf16, 4 for fp32, 18 / 32 for Q4_0.
        candidates: the one whose size is nearest is adjusted; by default all known shapes.
        vocab_size: replaces the vocabulary before anything is counted.
        min_layers: what the source model needs at least.
        min_intermediate_size: what the source model needs at least.
        width_step: the MLP's width changes by multiples of it.
    """
    known = candidates or list(SHAPES.values())
    if vocab_size is not None:
        known = [replace(shape, vocab_size=vocab_size) for shape in known]
    nearest = min(known, key=lambda s: abs(math.log(s.n_bytes(bytes_per_weight) / max(1, n_bytes))))
    n_weights = int(n_bytes / bytes_per_weight)
    if not n_weights:
        raise SynthError(f"a model of {format_bytes(n_bytes)} has no weights: ask for more")
    around_layers = nearest.parameters - nearest.n_layers * nearest.layer_parameters
    room = n_weights - around_layers
    n_layers = max(min_layers, round(room / nearest.layer_parameters))
    if n_layers > MAX_LAYERS:
        raise SynthError(
            f"{format_bytes(n_bytes)} of this width are {n_layers} layers, more than "
            f"{MAX_LAYERS}: ask for less, or for a wider shape with --like"
        )
    # What is left over or missing is spread over the MLPs of all layers.
    per_column = 3 * nearest.hidden_size * n_layers
    rest = room - n_layers * nearest.layer_parameters
    step = max(1, min(width_step, nearest.intermediate_size // 4))
    width = nearest.intermediate_size + round(rest / per_column / step) * step
    shape = replace(nearest, n_layers=n_layers, intermediate_size=width)
    if width < max(step, min_intermediate_size) or not 0.9 < shape.parameters / n_weights < 1.1:
        smallest = replace(
            nearest, n_layers=min_layers, intermediate_size=max(step, min_intermediate_size)
        )
        raise SynthError(
            f"cannot reach {format_bytes(n_bytes)}; the smallest model of this width takes "
            f"{format_bytes(smallest.n_bytes(bytes_per_weight))}: ask for more, or for a smaller "
            "vocabulary"
        )
    return shape


def _with_layers(shape: LlamaShape, n_bytes: int, min_layers: int, storage: Storage) -> LlamaShape:
    """As many whole layers as come nearest to `n_bytes`: experts keep their size."""
    least = storage.model_bytes(replace(shape, n_layers=min_layers))
    layer = storage.model_bytes(replace(shape, n_layers=min_layers + 1)) - least
    n_layers = min_layers + max(0, round((n_bytes - least) / layer))
    found = replace(shape, n_layers=n_layers)
    if n_layers > MAX_LAYERS or not 0.8 < storage.model_bytes(found) / n_bytes < 1.25:
        raise SynthError(
            f"cannot reach {format_bytes(n_bytes)} with 1 to {MAX_LAYERS} layers of "
            f"{format_bytes(layer)}; {min_layers}, as the small model has, take "
            f"{format_bytes(least)}"
        )
    return found


def choose_shape(
    source: LlamaShape,
    base: LlamaShape | None,
    n_bytes: int | None,
    vocab_size: int | None,
    storage: Storage,
) -> LlamaShape:
    """The shape named, or adjusted to a size; tied only if the source is, so sizes are right.

    Adjusted widths fill whole blocks, as those of the models that people have do.
    """
    if n_bytes is None:
        assert base is not None
        return base
    if source.experts is not None:
        if base is None:
            raise SynthError(
                "a mixture is grown to a shape: give --like, and a size cuts its layers"
            )
        if vocab_size is not None:
            base = replace(base, vocab_size=vocab_size)
        return _with_layers(base, n_bytes, source.n_layers, storage)
    known = [base] if base else list(SHAPES.values())
    candidates = [
        replace(
            shape,
            tied=shape.tied and source.tied,
            vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        )
        for shape in known
    ]
    # Of all, so that the width does not change from round to round.
    shape = min(candidates, key=lambda s: abs(math.log(storage.model_bytes(s) / max(1, n_bytes))))
    nearest = shape
    for _ in range(_ROUNDS_OF_SIZING):
        shape = shape_of_size(
            n_bytes,
            storage.model_bytes(shape) / shape.parameters,
            [nearest],
            min_layers=source.n_layers,
            min_intermediate_size=source.intermediate_size,
            width_step=max(_FFN_STEP, storage.block_size),
        )
    return shape
