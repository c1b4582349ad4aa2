"""What a model multiplies, without its weights: the sizes behind a roofline.

Made from a GGUF header (`gguf_shape`) or from a config.json and, where they are there, the headers
of its safetensors (`hf_shape`). Tensors that multiply are told from those that do not by their
rank: norms and biases are vectors, and cost nothing beside the matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.placement.experts import likely_hit

QKV = "qkv"
OUTPUT = "output"
FFN = "ffn"
OTHER = "other"
HEAD = "head"
"""Roles of a matrix: the projections into attention and out of it, the feed-forward part (routers
and experts included), what a family has besides, and the head."""


@dataclass(frozen=True)
class Matrix:
    """Weights [n_in, n_out] that multiply rows; or several of that shape, of which a row meets
    some: the experts of a mixture, or one for each attention head."""

    role: str
    n_in: int
    n_out: int
    n_bytes: int
    """Of all of them, as stored."""
    number_format: str
    n_matrices: int = 1
    n_active: int = 1
    """Matrices that one row is multiplied with."""

    @property
    def n_weights(self) -> int:
        return self.n_in * self.n_out * self.n_matrices

    @property
    def is_routed(self) -> bool:
        """Whether rows choose among several."""
        return self.n_active < self.n_matrices

    def read_share(self, num_tokens: int) -> float:
        """Of the matrices those that so many rows are likely to be multiplied with."""
        if not self.is_routed:
            return 1.0
        return likely_hit(self.n_matrices, self.n_active, num_tokens) / self.n_matrices


@dataclass(frozen=True)
class AttentionShape:
    """The products of activations with activations in one layer: QK^T and AV."""

    n_heads: int
    n_kv_heads: int
    """Fewer than heads where several queries share a key (GQA)."""
    key_length: int
    value_length: int
    kv_bytes_per_token: int
    """That one token's keys and values take in the layer's cache."""
    kv_format: str
    window: int | None = None
    """Last tokens that a query sees; None for all."""
    owns_kv: bool = True
    """False where the layer looks into another one's cache."""

    def n_keys(self, num_tokens: int, context: int) -> int:
        """Keys that at least one of the last `n_rows` of `context` tokens sees."""
        return context if self.window is None else min(context, self.window + num_tokens - 1)

    def n_keys_of_a_row(self, context: int) -> int:
        """Most keys that one row sees."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class LayerShape:
    matrices: tuple[Matrix, ...]
    attention: AttentionShape | None
    n_bytes: int
    """Of all tensors, vectors included."""


@dataclass(frozen=True)
class ModelShape:
    """One model."""

    path: Path
    family: str
    """model_type, or general.architecture."""
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerShape, ...]
    head: Matrix
    non_layer_bytes: int
    """Embedding, final norm and head; a tied head counts once."""
    activation_bytes: int
    """Of one number that goes from one operator to the next."""
    process_bytes: int = 0
    """That a process which runs it takes beside weights and KV cache, activations included."""
    notes: tuple[str, ...] = ()
    """What was assumed."""

    def matrices(self) -> Iterator[Matrix]:
        for layer in self.layers:
            yield from layer.matrices
        yield self.head

    @property
    def layer_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Of the layers, those of matrices that rows choose among."""
        return sum(m.n_bytes for layer in self.layers for m in layer.matrices if m.is_routed)

    @property
    def n_experts_in_all(self) -> int:
        """Of all layers."""
        return sum(
            max((m.n_matrices for m in layer.matrices if m.is_routed), default=0)
            for layer in self.layers
        )

    @property
    def largest_expert_bytes(self) -> float:
        return max(
            sum(m.n_bytes / m.n_matrices for m in layer.matrices if m.is_routed)
            for layer in self.layers
        )

    def read_expert_bytes(self, num_tokens: int) -> float:
        """Of these, what so many rows are likely to be multiplied with."""
        routed = (m for layer in self.layers for m in layer.matrices if m.is_routed)
        return sum(m.read_share(num_tokens) * m.n_bytes for m in routed)

    @property
    def weight_bytes(self) -> int:
        return self.layer_bytes + self.non_layer_bytes

    @property
    def n_weights(self) -> int:
        """In the matrices that multiply: a separate embedding is not among them."""
        return sum(matrix.n_weights for matrix in self.matrices())

    @property
    def kv_bytes_per_token(self) -> int:
        """Of all layers' caches, in full length also where a window would need less."""
        return sum(
            layer.attention.kv_bytes_per_token
            for layer in self.layers
            if layer.attention is not None and layer.attention.owns_kv
        )

    @property
    def number_formats(self) -> tuple[str, ...]:
        """All that a pass multiplies in, the KV cache's included."""
        caches = (x.attention.kv_format for x in self.layers if x.attention is not None)
        return tuple(dict.fromkeys([*(m.number_format for m in self.matrices()), *caches]))
