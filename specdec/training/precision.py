"""Precision of training: products in bf16 where that is fast, weights in float32."""

from __future__ import annotations

import torch


def in_bf16(device: torch.device) -> torch.autocast:
    """Return the context in which products are computed in bf16, where that is fast."""
    # Without such instructions bf16 products take six to ten times as long as float32's.
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_fast)
