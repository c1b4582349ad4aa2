"""Attention over segments of the keys, merged: what a tree's rows need no mask for gets none.

Every node of a tree sees the whole prefix, so a mask is needed for the few keys of the tree only:

    keys      [ prefix: no mask, any fused kernel | tree: a small mask ]
    partial        (o1, log-sum-exp 1)              (o2, log-sum-exp 2)
    output     (e^lse1 · o1 + e^lse2 · o2) / (e^lse1 + e^lse2)

That is softmax over all keys exactly (online softmax: Milakov & Gimelshein 2018; split keys as in
FlashDecoding, Dao et al. 2023). Query heads that share keys and values are rows of one product, so
keys and values are never repeated, and no kernel here keeps scores of nodes × context × heads.

Registered with transformers as SEGMENTED; `supports_segments` tells which families compute with it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.contract.backend import BackendError
from backends.hf.masks import Segment, SegmentedMask

SEGMENTED = "specdec_segments"
"""Name of this attention among those of transformers."""
MAX_SCORE_BYTES = 32 << 20
"""Of the float32 scores that the plain kernel holds at a time, where no fused one will do."""
_FUSED_HEAD_DIM = 256
_FUSED_ALIGNMENT = 8
_OUTSIDE = ("s_aux", "position_bias")
"""What a family may add to its attention that segments know nothing of."""
_ATTENTIVE_CLASS = re.compile(r"Attention|Layer$|Block$")

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output [kv heads, group, rows, dim] over some keys, and log-sum-exp float32 [kv heads, group,
rows] of their scores."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segment, float], Partial]
"""(queries [kv heads, group, rows, dim], keys and values [kv heads, 1, keys, dim], segment, scale).

The keys are the segment's alone."""


def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: SegmentedMask,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries [1, heads, rows, dim] over keys and values [1, kv heads, keys, dim].

    The interface is transformers' (AttentionInterface); windows are in the segments.
    softcap: scores become softcap · tanh(scores / softcap) (Gemma 2).
    Returns [1, rows, heads, value dim].
    """
    _check_arguments(module, key, attention_mask, kwargs)
    _, n_heads, n_rows, dim = query.shape
    n_kv_heads = key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    queries = query.reshape(n_kv_heads, n_heads // n_kv_heads, n_rows, dim)
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    kernel = choose_kernel(query, softcap, max(dim, value.shape[-1]))
    merged: Partial | None = None
    for segment in attention_mask.segments:
        span = slice(segment.start, segment.end)
        partial = kernel(queries, keys[:, :, span], values[:, :, span], segment, scale)
        merged = partial if merged is None else merge(merged, partial)
    assert merged is not None, "a row sees itself at least"
    # Kernels differ in how their outputs lie in memory.
    output = merged[0].to(query.dtype).permute(2, 0, 1, 3).reshape(1, n_rows, n_heads, -1)
    return output.contiguous(), None


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both; the output is float32."""
    (output1, lse1), (output2, lse2) = first, second
    share = torch.sigmoid(lse2 - lse1).unsqueeze(-1)  # of the second, in the sum of exponentials
    return torch.lerp(output1.float(), output2.float(), share), torch.logaddexp(lse1, lse2)


def choose_kernel(query: torch.Tensor, softcap: float | None, head_dim: int) -> Kernel:
    """The kernel for queries of that kind; head_dim: the wider one of keys and values."""
    if softcap is not None:
        return _SoftcapKernel(softcap)
    if head_dim > _FUSED_HEAD_DIM:
        return blockwise_kernel
    if query.device.type == "cpu":
        return cpu_kernel
    if query.device.type == "cuda":
        return _cuda_kernel(query)
    return blockwise_kernel


def cpu_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scale: float
) -> Partial:
    """PyTorch's flash attention for CPUs, the one behind its scaled_dot_product_attention."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, segment.is_causal, attn_mask=segment.mask, scale=scale
        )
        return output, lse

    return _fused(run, queries, keys, values, segment)


def cuda_flash_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scale: float
) -> Partial:
    """Flash attention; segments with a mask, which it has no place for, go to the efficient one."""
    if segment.mask is not None:
        return cuda_efficient_kernel(queries, keys, values, segment, scale)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, segment.is_causal, False, scale=scale
        )
        return output, lse

    return _fused(run, queries, keys, values, segment)


def cuda_efficient_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scale: float
) -> Partial:
    """Memory-efficient attention: any dtype, and masks (as views, the same for every head)."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
        mask = segment.mask
        if mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2])
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            q, k, v, mask, True, 0.0, segment.is_causal, scale=scale
        )
        return output, lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32

    return _fused(run, queries, keys, values, segment)


def blockwise_kernel(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    """Plain products, a block of keys at a time: for what no fused kernel can do, on any device."""
    n_keys = keys.shape[2]
    block = max(16, MAX_SCORE_BYTES // (4 * queries[..., 0].numel()))
    merged: Partial | None = None
    for start in range(0, n_keys, block):
        end = min(start + block, n_keys)
        scores = _product(queries, keys[:, :, start:end].transpose(2, 3)).float().mul_(scale)
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if segment.mask is not None:
            scores += segment.mask[..., start:end]
        if segment.is_causal:
            scores.masked_fill_(_unseen(scores, start), torch.finfo(torch.float32).min / 2)
        lse = scores.logsumexp(dim=-1)
        probs = scores.sub_(lse.unsqueeze(-1)).exp_().to(values.dtype)
        partial = _product(probs, values[:, :, start:end]), lse
        merged = partial if merged is None else merge(merged, partial)
    assert merged is not None, "segments are not empty"
    return merged


class _SoftcapKernel:
    """`blockwise_kernel` with capped scores, which no fused kernel of PyTorch knows."""

    def __init__(self, softcap: float) -> None:
        self._softcap = softcap

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        segment: Segment,
        scale: float,
    ) -> Partial:
        return blockwise_kernel(queries, keys, values, segment, scale, self._softcap)


def supports_segments(architecture: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether a family's attention can be computed in segments; else it is given whole masks.

    It must take its attention from transformers' interface, pass the mask on untouched, and add
    nothing to plain attention but a softcap.
    """
    has_softcap = bool(getattr(config, "attn_logit_softcapping", None))
    if not architecture._supports_attention_backend:
        return False
    if not architecture._supports_sdpa and not has_softcap:
        return False  # sinks and the like
    try:
        source = inspect.getsource(sys.modules[architecture.__module__])
    except (OSError, TypeError):
        return False
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    attentive = [node for node in classes if _ATTENTIVE_CLASS.search(node.name)]
    return not any(_looks_into_mask(node) for one in attentive for node in ast.walk(one))


def _looks_into_mask(node: ast.AST) -> bool:
    """Whether code reads or computes with `attention_mask` instead of handing it on."""
    inner: list[ast.expr] = []
    if isinstance(node, ast.Attribute | ast.Subscript):
        inner = [node.value]
    elif isinstance(node, ast.BinOp):
        inner = [node.left, node.right]
    return any(isinstance(part, ast.Name) and part.id == "attention_mask" for part in inner)


def _check_arguments(
    module: torch.nn.Module, key: torch.Tensor, mask: object, kwargs: dict[str, Any]
) -> None:
    """Raise BackendError for attention that would not be computed as its family means it."""
    name = type(module).__name__
    if not isinstance(mask, SegmentedMask):
        raise BackendError(f"{name} was given no segments: its mask is {type(mask).__name__}")
    if key.shape[0] != 1 or key.shape[2] != mask.n_keys:
        raise BackendError(
            f"{name} has keys {list(key.shape)}, its mask is for 1 sequence of {mask.n_keys}"
        )
    for argument in _OUTSIDE:
        if kwargs.get(argument) is not None:
            raise BackendError(f"{name} has {argument}, which attention in segments lacks")


def _cuda_kernel(query: torch.Tensor) -> Kernel:
    """Flash attention takes half precision on Ampere and later; bf16 needs those in any case."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    is_ampere = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if is_half and is_ampere and torch.backends.cuda.is_flash_attention_available():
        return cuda_flash_kernel
    if query.dtype == torch.bfloat16 and not is_ampere:
        return blockwise_kernel
    return cuda_efficient_kernel


def _fused(
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Partial],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
) -> Partial:
    """Call a fused kernel, which wants as many heads of keys as of queries and one width for all.

    Without a mask the heads of a group are more rows of one head. With one they stay heads, whose
    keys are the same memory (a stride of 0), so that the mask need not be repeated.
    """
    n_kv_heads, group, n_rows, _ = queries.shape
    value_dim = values.shape[-1]
    queries, keys, values = _padded(queries, keys, values)
    if segment.mask is None and not segment.is_causal:
        output, lse = run(queries.reshape(n_kv_heads, 1, group * n_rows, -1), keys, values)
    else:
        shape = (n_kv_heads, group, keys.shape[2], keys.shape[3])
        output, lse = run(queries, keys.expand(shape), values.expand(shape))
    shape = (n_kv_heads, group, n_rows, -1)
    return output.reshape(shape)[..., :value_dim], lse.reshape(shape[:3])


def _padded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Zeros up to a common width change neither scores nor, once cut off, the output."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    width = -(-widest // _FUSED_ALIGNMENT) * _FUSED_ALIGNMENT
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)


def _product(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """rows [kv heads, group, rows, k] by shared [kv heads, 1, k, n]: one product for a group."""
    n_kv_heads, group, n_rows, _ = rows.shape
    product = rows.reshape(n_kv_heads, group * n_rows, -1) @ shared[:, 0]
    return product.view(n_kv_heads, group, n_rows, -1)


def _unseen(scores: torch.Tensor, start: int) -> torch.Tensor:
    """Bool [rows, keys] of a causal segment: the keys start.. after each row's own."""
    n_rows, n_keys = scores.shape[-2:]
    ones = torch.ones(n_rows, n_keys, dtype=torch.bool, device=scores.device)
    return ones.triu_(1 - start)


AttentionInterface.register(SEGMENTED, segmented_attention)
