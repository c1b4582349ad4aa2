"""Logits that stay on the device of the pass that computed them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from backends.hf.forward import on_host

Computing = Callable[[], AbstractContextManager[None]]
"""See TorchWeights.computing."""


class DeviceRows:
    """See LogitRows.

    Attributes:
        on_device: [n, vocab] in the format of the weights. Memory of its own: a recorded pass
            writes over its output when it is replayed.
    """

    def __init__(self, on_device: torch.Tensor, computing: Computing) -> None:
        self.on_device = on_device
        self._computing = computing

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.on_device.shape)

    def __len__(self) -> int:
        return int(self.on_device.shape[0])

    def __getitem__(self, index: int, /) -> np.ndarray:
        return self._fetch(lambda: self.on_device[index])

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._fetch(lambda: self.on_device), dtype=dtype)

    def _fetch(self, part: Callable[[], torch.Tensor]) -> np.ndarray:
        """In the stream that computed them, whichever thread asks."""
        with self._computing(), torch.inference_mode():
            return on_host(part())
