"""Sums of short convolutions in a compiled loop, with the same bits as torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backends.recurrent.walks import divided
from backends.tiles.compiling import compiled_lazily


def weighted_sums(
    inputs: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor
) -> torch.Tensor:
    """Return [windows, channels]: the sum of each window's inputs times their weights, in order.

    inputs: float32 [tokens, channels]. weight: float32 [width, channels]. windows: rows of the
    inputs, int64 [windows, width].
    """
    arrays = (inputs.contiguous().numpy(), weight.numpy(), windows.numpy())
    out = np.empty((len(windows), inputs.shape[1]), np.float32)

    def run(first: int, last: int) -> None:
        _sums(first, last, *arrays, out)

    divided(run, len(windows), out.size * weight.shape[0])
    return torch.from_numpy(out)


@compiled_lazily
def _sums(first: Any, last: Any, inputs: Any, weight: Any, windows: Any, out: Any) -> None:
    """Compute the windows first..last."""
    n_columns = inputs.shape[1]
    for n in range(first, last):
        total = out[n]
        for i in range(windows.shape[1]):
            row, factor = inputs[windows[n, i]], weight[i]
            if i == 0:
                for j in range(n_columns):
                    total[j] = row[j] * factor[j]
            else:
                for j in range(n_columns):
                    total[j] += row[j] * factor[j]
