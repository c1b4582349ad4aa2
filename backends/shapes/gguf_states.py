"""Shapes of the recurrent states of a GGUF model, from its metadata: llama.cpp's hparams.n_embd_r()
(the inputs that a convolution keeps) and n_embd_s() (the state), all in float32."""

from __future__ import annotations

from collections.abc import Iterable

from backends.gguf.hparams import MAX_HEAD_SIZE, MAX_HEADS, Keys
from backends.shapes.shape import StateShape
from offload.formats.tensors import TensorRecord

_FLOAT32 = 4
_MAX_SIZE = 2**20
_DELTA, _MAMBA = 3, 2
"""Products of a number of the state: a delta rule compares before it adds, Mamba does not."""


def has_attention(tensors: Iterable[TensorRecord]) -> bool:
    """Return whether a layer has keys and values.

    Kimi Delta Attention (ssm_f_a) has products named so, too, and Gated DeltaNet one attn_qkv.
    """
    names = " ".join(record.name for record in tensors)
    if ".attn_k." in names:
        return ".ssm_f_a" not in names
    return ".attn_kv_a" in names or (".attn_qkv." in names and ".ssm_" not in names)


def layer_states(
    tensors: Iterable[TensorRecord], keys: Keys, hidden_size: int
) -> tuple[StateShape, ...]:
    """Return the states of one layer; () without recurrence."""
    names = " ".join(record.name for record in tensors)
    if ".shortconv" in names:
        n_kept = keys.integer("shortconv.l_cache", 1, MAX_HEAD_SIZE) - 1
        return (_state(n_kept * hidden_size, 1, hidden_size),)
    if ".ssm_" not in names:
        return ()
    n_kept = keys.integer("ssm.conv_kernel", 1, MAX_HEAD_SIZE) - 1
    if "kda.head_dim" in keys:
        size = keys.integer("kda.head_dim", 1, MAX_HEAD_SIZE)
        inner = keys.per_layer("attention.head_count", 1, MAX_HEADS)[0] * size
        return (_state(n_kept * 3 * inner, 1, 3 * inner), _state(size * inner, _DELTA, 5 * inner))
    inner = keys.integer("ssm.inner_size", 1, _MAX_SIZE)
    size = keys.integer("ssm.state_size", 1, _MAX_SIZE)
    is_first_mamba = ".ssm_x" in names  # B and C come after its convolution
    n_groups = 0 if is_first_mamba else keys.integer("ssm.group_count", 0, _MAX_SIZE, 0)
    mixed = inner + 2 * n_groups * size
    n_products = _DELTA if ".ssm_beta" in names or ".ssm_ba" in names else _MAMBA
    return (_state(n_kept * mixed, 1, mixed), _state(size * inner, n_products, mixed))


def _state(n_elements: int, n_products: int, n_inputs: int) -> StateShape:
    return StateShape(n_elements, _FLOAT32 * n_elements, n_products, n_inputs)
