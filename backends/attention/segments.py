"""Attention on a GPU over segments of the keys, merged, so that the prefix needs no mask.

Every node of a tree sees the whole prefix, so only the few keys of the tree need a mask:

    keys      [ prefix: no mask, any fused kernel | tree: a small mask ]
    partial        (o1, log-sum-exp 1)              (o2, log-sum-exp 2)
    output     (e^lse1 · o1 + e^lse2 · o2) / (e^lse1 + e^lse2)

That is softmax over all keys exactly (online softmax: Milakov & Gimelshein 2018; split keys as in
FlashDecoding, Dao et al. 2023). Query heads that share keys and values are rows of one product, so
keys and values are never repeated, and no kernel here keeps scores of nodes × context × heads.

The borders of the segments depend on the pass, so this attention is not exact: see blocks.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from backends.attention.masks import Segment, SegmentedMask, SegmentedRows

MAX_SCORE_BYTES = 32 << 20
"""Maximum size of the float32 scores of the plain kernel, used where no fused one fits."""
_FUSED_HEAD_DIM = 256
_FUSED_ALIGNMENT = 8

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output [kv heads, group, rows, dim] over some keys, and log-sum-exp float32 [kv heads, group,
rows] of their scores."""
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Segment, float], Partial]
"""(queries [kv heads, group, rows, dim], keys and values [kv heads, 1, keys, dim], segment, scale).

The keys are the segment's alone."""


def attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: SegmentedMask,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output [1, rows, heads, value dim]; see `BlockedMask.attend`."""
    outputs = [
        _attend_rows(query[:, :, part.start : part.end], key, value, part, scale, softcap, sinks)
        for part in mask.parts
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: SegmentedRows,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output [1, rows, heads, value dim] of one sequence's rows."""
    _, n_heads, num_tokens, dim = query.shape
    n_kv_heads = key.shape[1]
    queries = query.reshape(n_kv_heads, n_heads // n_kv_heads, num_tokens, dim)
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    kernel = choose_kernel(query, softcap, max(dim, value.shape[-1]))
    merged: Partial | None = None
    for segment in part.segments:
        span = slice(segment.start, segment.end)
        partial = kernel(queries, keys[:, :, span], values[:, :, span], segment, scale)
        merged = partial if merged is None else merge(merged, partial)
    assert merged is not None, "a row sees itself at least"
    if sinks is not None:
        scores = sinks.float().view(n_kv_heads, -1, 1).expand(merged[1].shape)
        merged = merge(merged, (torch.zeros_like(merged[0]), scores))
    # Kernels differ in how their outputs lie in memory.
    output = merged[0].to(query.dtype).permute(2, 0, 1, 3).reshape(1, num_tokens, n_heads, -1)
    return output.contiguous()


def merge(first: Partial, second: Partial) -> Partial:
    """Merge attention over two disjoint sets of keys; the output is float32."""
    (output1, lse1), (output2, lse2) = first, second
    share = torch.sigmoid(lse2 - lse1).unsqueeze(-1)  # the second's share of the exponentials
    return torch.lerp(output1.float(), output2.float(), share), torch.logaddexp(lse1, lse2)


def choose_kernel(query: torch.Tensor, softcap: float | None, head_dim: int) -> Kernel:
    """Return the kernel for these queries; head_dim: the larger of the key and value dims."""
    if softcap is not None:
        return _SoftcapKernel(softcap)
    if head_dim > _FUSED_HEAD_DIM or query.device.type != "cuda":
        return blockwise_kernel
    return _cuda_kernel(query)


def cuda_flash_kernel(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, segment: Segment, scale: float
) -> Partial:
    """Flash attention; it takes no mask, so masked segments use the memory-efficient kernel."""
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
    """Plain products, a block of keys at a time; any device, for cases without a fused kernel."""
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
    """`blockwise_kernel` with softcapped scores, which no fused kernel of PyTorch supports."""

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


def _cuda_kernel(query: torch.Tensor) -> Kernel:
    """Return the fused kernel: flash attention needs half precision and Ampere or later."""
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
    """Call a fused kernel, which needs equal numbers of query and key heads and one head dim.

    Without a mask the heads of a group become rows of one head. With a mask they stay heads, whose
    keys are the same memory (a stride of 0), so that the mask need not be repeated.
    """
    n_kv_heads, group, num_tokens, _ = queries.shape
    value_dim = values.shape[-1]
    queries, keys, values = _padded(queries, keys, values)
    if segment.mask is None and not segment.is_causal:
        output, lse = run(queries.reshape(n_kv_heads, 1, group * num_tokens, -1), keys, values)
    else:
        shape = (n_kv_heads, group, keys.shape[2], keys.shape[3])
        output, lse = run(queries, keys.expand(shape), values.expand(shape))
    shape = (n_kv_heads, group, num_tokens, -1)
    return output.reshape(shape)[..., :value_dim], lse.reshape(shape[:3])


def _padded(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pad with zeros to a common width, which changes neither scores nor the cropped output."""
    widest = max(tensor.shape[-1] for tensor in tensors)
    width = -(-widest // _FUSED_ALIGNMENT) * _FUSED_ALIGNMENT
    return tuple(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in tensors)


def _product(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Multiply rows [kv heads, group, rows, k] by shared [kv heads, 1, k, n], per group."""
    n_kv_heads, group, num_tokens, _ = rows.shape
    product = rows.reshape(n_kv_heads, group * num_tokens, -1) @ shared[:, 0]
    return product.view(n_kv_heads, group, num_tokens, -1)


def _unseen(scores: torch.Tensor, start: int) -> torch.Tensor:
    """Return bool [rows, keys] of a causal segment: which keys from `start` on are hidden."""
    num_tokens, n_keys = scores.shape[-2:]
    ones = torch.ones(num_tokens, n_keys, dtype=torch.bool, device=scores.device)
    return ones.triu_(1 - start)
