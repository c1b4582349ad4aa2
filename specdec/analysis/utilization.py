"""Model FLOPs utilisation: how much of the machine's arithmetic the generated tokens needed.

Chowdhery et al. 2022 (PaLM), section 4.1 and appendix B: FLOPs that the tokens need whatever the
implementation does, over those that the machine could have done meanwhile. What is computed for
rejected tokens therefore does not count (`flops_rejected_fraction` does count it).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.contract.source import BackendOptions, ModelCompute
from backends.shapes.shape import ModelShape
from offload.errors import SpecdecError
from specdec.analysis.analyze import read_shape
from specdec.analysis.operators import pass_work, total


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a token of one model, and the machine's peak."""

    shape: ModelShape
    peak_flops_per_second: float

    @classmethod
    def measured(cls, shape: ModelShape, compute: ModelCompute) -> ModelFlops:
        """Return the ModelFlops with the fastest measured products of `compute` as the peak."""
        matrices = [matrix for layer in shape.layers for matrix in layer.matrices]
        weights_per_byte = sum(m.n_weights for m in matrices) / sum(m.n_bytes for m in matrices)
        tokens_per_second = compute.per_byte.max_tokens_per_second  # of one byte of weights
        return cls(shape, 2 * weights_per_byte * tokens_per_second)

    def of_tokens(self, n_tokens: int, context: int) -> int:
        """Return the FLOPs of `n_tokens` with an average context of `context`, themselves included.

        Counted are the matrices once per token, and attention to all of the context (to the window,
        where a layer has one).
        """
        return n_tokens * total(pass_work(self.shape, 1, max(context, 1), 1).values()).flops


def model_flops(path: Path, options: BackendOptions, compute: ModelCompute) -> ModelFlops | None:
    """Return the ModelFlops of a model; None where headers do not tell its shape."""
    try:
        return ModelFlops.measured(read_shape(path, options), compute)
    except SpecdecError:
        return None
