"""Work of one forward pass: FLOPs, memory operations and bytes of each operator.

Conventions. A product [n, k] x [k, m] has 2nkm FLOPs and nk + km + nm memory operations: each
operand is read once and the result written once, counted in elements. Of these the km elements of
weights, or of keys and values, are *stored*: they stay in memory between passes and must be read,
while activations were just made. An operator's arithmetic intensity is FLOPs over all of its memory
operations; a whole pass's traffic, which grows to gigabytes, is that of the stored elements alone.

A pass has n tokens, and `context` keys (those of the n tokens included) are attended to:

- projections and feed-forward: one product for each matrix of the file;
- attention: for each KV head, QK^T [n g, k] x [k, context] and AV [n g, context] x [context, v],
  g the queries that share a key; the products are counted dense, masked scores included, as they
  are computed; softmax, norms, rotations, biases and AltUp's mixing of streams (Gemma 3n) are not
  counted (below 1 % of the FLOPs);
- a recurrent layer: the products of its state with what a token forgets, adds and reads; the state
  stays in the cache of a core while the tokens of a pass go through it, so it is read and written
  once;
- a sliding window: a token attends to at most `window` keys, and n tokens to `window + n - 1`;
- a mixture of experts: FLOPs of the active experts, memory operations of those that n tokens are
  likely to be routed to, which is an estimate (offload/placement/experts.py).

Bytes count the same elements in their real size: weights as stored (quantised ones too), keys and
values as cached, activations as computed.

With these, Llama-2-7B with two feed-forward matrices (hidden 4096, 32 heads, 11008, 32 layers) has
15.93774 FLOPs per memory operation in a projection at n = 8, 14.84058 in attention at n = 8 and
context 512, 874.0844 in feed-forward at n = 512; its layers do 11648 x 2^20 FLOPs for a token at
context 4096, and store 12992 x 2^20 elements at context 32768
(tests/specdec/analysis/test_analyze.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from backends.shapes.shape import (
    FFN,
    HEAD,
    OTHER,
    OUTPUT,
    QKV,
    STATE_FORMAT,
    AttentionShape,
    Matrix,
    ModelShape,
    StateShape,
)

ATTENTION, STATES = "attention", "states"
OPERATORS = (QKV, ATTENTION, STATES, OUTPUT, FFN, OTHER, HEAD)
"""Operators in the order of a pass."""


@dataclass(frozen=True)
class Work:
    """Work of an operator in a pass, all layers together."""

    n_products: int = 0
    """Matrix products; the experts of a mixture count one each."""
    flops: int = 0
    elements: int = 0
    """Memory operations."""
    stored_elements: int = 0
    """Memory operations on weights or keys and values."""
    n_bytes: int = 0
    """The memory operations in bytes."""
    stored_bytes: int = 0
    expert_bytes: int = 0
    """Stored bytes of the experts that tokens are routed to."""
    flops_by_format: Mapping[str, int] = field(default_factory=dict)
    """FLOPs by the number format of weights, or keys."""

    @property
    def intensity(self) -> float:
        """FLOPs per memory operation."""
        return self.flops / self.elements if self.elements else 0.0

    @property
    def byte_intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.n_bytes if self.n_bytes else 0.0


def total(parts: Iterable[Work]) -> Work:
    parts = list(parts)
    formats = dict.fromkeys(name for part in parts for name in part.flops_by_format)
    return Work(
        sum(part.n_products for part in parts),
        sum(part.flops for part in parts),
        sum(part.elements for part in parts),
        sum(part.stored_elements for part in parts),
        sum(part.n_bytes for part in parts),
        sum(part.stored_bytes for part in parts),
        sum(part.expert_bytes for part in parts),
        {name: sum(part.flops_by_format.get(name, 0) for part in parts) for name in formats},
    )


def matrix_work(matrix: Matrix, num_tokens: int, activation_bytes: int) -> Work:
    """Return the work of `num_tokens` through one matrix, or through the active ones of several."""
    n_products = num_tokens * matrix.n_active
    flops = 2 * n_products * matrix.n_in * matrix.n_out
    activations = n_products * (matrix.n_in + matrix.n_out)
    share = matrix.read_share(num_tokens)
    stored, stored_bytes = int(share * matrix.n_weights), int(share * matrix.n_bytes)
    return Work(
        n_products=matrix.n_matrices,
        flops=flops,
        elements=activations + stored,
        stored_elements=stored,
        n_bytes=activations * activation_bytes + stored_bytes,
        stored_bytes=stored_bytes,
        expert_bytes=stored_bytes if matrix.is_routed else 0,
        flops_by_format={matrix.number_format: flops},
    )


def attention_work(
    shape: AttentionShape, num_tokens: int, context: int, activation_bytes: int
) -> Work:
    """Return the work of QK^T and AV in a layer, for the last `num_tokens` of `context` tokens."""
    n_keys, n_scores = shape.n_keys(num_tokens, context), shape.n_keys_of_a_row(context)
    lengths = shape.key_length + shape.value_length
    flops = 2 * shape.n_heads * num_tokens * n_scores * lengths
    # Queries and the output; the scores once as a result and once as an operand.
    activations = shape.n_heads * num_tokens * (lengths + 2 * n_scores)
    stored = shape.n_kv_heads * n_keys * lengths
    stored_bytes = n_keys * shape.kv_bytes_per_token
    return Work(
        n_products=2 * shape.n_kv_heads,
        flops=flops,
        elements=activations + stored,
        stored_elements=stored,
        n_bytes=activations * activation_bytes + stored_bytes,
        stored_bytes=stored_bytes,
        flops_by_format={shape.kv_format: flops},
    )


def state_work(shape: StateShape, num_tokens: int, activation_bytes: int) -> Work:
    """Return the work of `num_tokens` of one sequence through one recurrent state."""
    flops = 2 * shape.n_products * shape.n_elements * num_tokens
    inputs = shape.n_inputs * num_tokens
    return Work(
        n_products=shape.n_products,
        flops=flops,
        elements=inputs + 2 * shape.n_elements,
        stored_elements=2 * shape.n_elements,
        n_bytes=inputs * activation_bytes + 2 * shape.n_bytes,
        stored_bytes=2 * shape.n_bytes,
        flops_by_format={STATE_FORMAT: flops},
    )


def pass_work(model: ModelShape, num_tokens: int, context: int, n_logits: int) -> dict[str, Work]:
    """Return the work of every operator that the model has, in the order of OPERATORS.

    n_logits: number of tokens whose logits are computed.
    """
    result: dict[str, list[Work]] = {name: [] for name in OPERATORS}
    size = model.activation_bytes
    for layer in model.layers:
        for matrix in layer.matrices:
            result[matrix.role].append(matrix_work(matrix, num_tokens, size))
        result[STATES] += (state_work(state, num_tokens, size) for state in layer.states)
        if layer.attention is not None:
            result[ATTENTION].append(attention_work(layer.attention, num_tokens, context, size))
    for matrix in model.projections:
        result[matrix.role].append(matrix_work(matrix, num_tokens, size))
    result[HEAD].append(matrix_work(model.head, n_logits, size))
    return {name: total(parts) for name, parts in result.items() if parts}
