"""Shapes of a model's matrix products without its weights: the input of a roofline analysis.

Read from a GGUF header (`gguf_shape`) or from a config.json and, if present, the headers of its
safetensors (`hf_shape`). Matrices are recognised by their rank: norms and biases are vectors, whose
cost is negligible.
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
"""Roles of a matrix: the projections into and out of attention, the feed-forward part (including
routers and experts), anything else in a layer, and the head."""
STATE_FORMAT = "F32"
"""Number format of the arithmetic of recurrent states."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix [n_in, n_out], or several of that shape of which a row uses some: the experts
    of a mixture, or one for each attention head."""

    role: str
    n_in: int
    n_out: int
    n_bytes: int
    """Stored bytes of all matrices."""
    number_format: str
    n_matrices: int = 1
    n_active: int = 1
    """Matrices that one row is multiplied with."""

    @property
    def n_weights(self) -> int:
        return self.n_in * self.n_out * self.n_matrices

    @property
    def is_routed(self) -> bool:
        """Whether each row uses only some of the matrices (experts)."""
        return self.n_active < self.n_matrices

    def read_share(self, num_tokens: int) -> float:
        """Return the expected share of the matrices that a pass of `num_tokens` reads."""
        if not self.is_routed:
            return 1.0
        return likely_hit(self.n_matrices, self.n_active, num_tokens) / self.n_matrices


@dataclass(frozen=True)
class AttentionShape:
    """The products of activations with activations in one layer: QK^T and AV."""

    n_heads: int
    n_kv_heads: int
    """Number of KV heads, less than `n_heads` with grouped-query attention."""
    key_length: int
    value_length: int
    kv_bytes_per_token: int
    """Bytes of one token's keys and values in the layer's cache."""
    kv_format: str
    window: int | None = None
    """Sliding window in tokens; None for full attention."""
    owns_kv: bool = True
    """Whether the layer has a cache of its own instead of sharing another layer's."""

    def n_keys(self, num_tokens: int, context: int) -> int:
        """Return the number of keys that any of the last `num_tokens` of `context` tokens sees."""
        return context if self.window is None else min(context, self.window + num_tokens - 1)

    def n_keys_of_a_row(self, context: int) -> int:
        """Return the maximum number of keys that one row sees."""
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class StateShape:
    """A state that a recurrent layer replaces with every token, computed in STATE_FORMAT."""

    n_elements: int
    n_bytes: int
    """Bytes for one sequence, whatever its length."""
    n_products: int
    """Products of each of its numbers with a number of a token: what is forgotten, added, read."""
    n_inputs: int
    """Numbers that one token feeds to it."""


@dataclass(frozen=True)
class LayerShape:
    matrices: tuple[Matrix, ...]
    attention: AttentionShape | None
    n_bytes: int
    """Bytes of all tensors, including vectors."""
    states: tuple[StateShape, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """Shape of one model."""

    path: Path
    family: str
    """Value of model_type (config.json) or general.architecture (GGUF)."""
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerShape, ...]
    head: Matrix
    non_layer_bytes: int
    """Embedding, final norm and head; a tied head counts once."""
    activation_bytes: int
    """Bytes of one number of an activation."""
    process_bytes: int = 0
    """Memory of the process beside weights and KV cache, including activations."""
    notes: tuple[str, ...] = ()
    """Assumptions that were made."""
    projections: tuple[Matrix, ...] = ()
    """Matrices beside the layers that every token is multiplied with, other than the head
    (OPT-350M's projections, Gemma 3n's inputs of its layers)."""

    def matrices(self) -> Iterator[Matrix]:
        for layer in self.layers:
            yield from layer.matrices
        yield from self.projections
        yield self.head

    @property
    def layer_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(m.n_bytes for layer in self.layers for m in layer.matrices if m.is_routed)

    @property
    def n_experts_in_all(self) -> int:
        """Number of experts of all layers."""
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
        """Return the expected bytes of routed experts that a pass of `num_tokens` reads."""
        routed = (m for layer in self.layers for m in layer.matrices if m.is_routed)
        return sum(m.read_share(num_tokens) * m.n_bytes for m in routed)

    @property
    def weight_bytes(self) -> int:
        return self.layer_bytes + self.non_layer_bytes

    @property
    def n_weights(self) -> int:
        """Number of weights of all matrices, without a separate embedding."""
        return sum(matrix.n_weights for matrix in self.matrices())

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache bytes per token of all layers, in full length even with a sliding window."""
        return sum(
            layer.attention.kv_bytes_per_token
            for layer in self.layers
            if layer.attention is not None and layer.attention.owns_kv
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence."""
        return sum(state.n_bytes for layer in self.layers for state in layer.states)

    def sequence_bytes(self, context: int) -> int:
        """Return the bytes of keys, values and states of one sequence of `context` tokens."""
        return context * self.kv_bytes_per_token + self.state_bytes

    @property
    def number_formats(self) -> tuple[str, ...]:
        """Number formats of all products of a pass, including those of the KV cache and states."""
        caches = (x.attention.kv_format for x in self.layers if x.attention is not None)
        states = (STATE_FORMAT for x in self.layers if x.states)
        return tuple(dict.fromkeys([*(m.number_format for m in self.matrices()), *caches, *states]))
