"""The routed experts of a layer, computed one after the other as they are fetched.

Registered with transformers' ExpertsInterface under the name ONE_BY_ONE. Its own functions compute
from parameters that have all experts of a layer. Here each active expert is fetched as its tensors
in the file, in the slot that they were read into, and multiplied with the rows routed to it. On a
CPU transformers' grouped product is such a loop, too, up to 1.3 times as fast; but it needs the
weights of all active experts contiguously, which is a copy of every byte read (docs/benchmarks.md).

Each row's outputs are added in the order of its own choice of experts, and a group is padded to
`min_batch_tokens` rows: so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from backends.feedforward.elementwise import in_whole_vectors
from backends.feedforward.linear import linear_of
from backends.feedforward.records import stacked_parts
from offload.ring.slots import Check

ONE_BY_ONE = "specdec"
"""Name of this computation among transformers' implementations of experts."""


class StoredMatrix(Protocol):
    """A matrix [n_out, n_in] that is decoded as it is multiplied."""

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [n, n_in] times the matrix, plus `bias`; a row's bits do not depend on other
        rows."""


Matrix: TypeAlias = torch.Tensor | StoredMatrix
FetchExperts = Callable[
    [Sequence[int], Check | None], Generator[tuple[int, list[Matrix]], None, None]
]
"""(experts, check) -> each expert once, in any order, with its matrices, valid until the next."""


class ExpertsRunner:
    """The computation of a transformers module of experts that was built for ONE_BY_ONE.

    Args:
        fetch: fetches a layer's experts.
        min_batch_tokens: minimum rows of a product.
    """

    def __init__(self, module: nn.Module, fetch: FetchExperts, min_batch_tokens: int) -> None:
        self._module, self._fetch, self._min_batch_tokens = module, fetch, min_batch_tokens
        self._is_transposed = bool(module.is_transposed)
        n_inner = module.down_proj.shape[1 if module.is_transposed else 2]
        gate = module._apply_gate if module.has_gate else module.act_fn
        self._gate = in_whole_vectors(gate, n_inner)
        self._inputs_name = stacked_parts(module)[0]
        self.check: Check | None = None
        """Function called while waiting for experts; an exception from it ends the wait."""
        module.experts_runner = self

    def detach(self) -> None:
        """Detach from the module, which cannot compute afterwards. Idempotent."""
        self._module.__dict__.pop("experts_runner", None)

    def __call__(
        self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Compute hidden states [rows, hidden] with each row's experts and weights [rows, k]."""
        num_rows, n_used = experts.shape
        chosen = experts.flatten()
        outputs = hidden.new_empty(num_rows * n_used, hidden.shape[1])
        with closing(self._fetch(chosen.unique().tolist(), self.check)) as fetched:
            for expert, matrices in fetched:
                places = (chosen == expert).nonzero()[:, 0]
                outputs[places] = self._compute(expert, matrices, hidden[places // n_used])
        weighted = outputs.view(num_rows, n_used, -1) * weights[..., None]
        total = weighted[:, 0].float()
        for i in range(1, n_used):
            total = total + weighted[:, i]
        return total.to(hidden.dtype)

    def _compute(self, expert: int, matrices: list[Matrix], rows: torch.Tensor) -> torch.Tensor:
        is_plain = any(isinstance(matrix, torch.Tensor) for matrix in matrices)
        n_missing = max(0, self._min_batch_tokens - len(rows)) if is_plain else 0
        x = pad(rows, (0, 0, 0, n_missing))
        *inputs, down = matrices
        pairs = [self._multiply(x, weight, expert, self._inputs_name) for weight in inputs]
        x = self._gate(pairs[0] if len(pairs) == 1 else torch.cat(pairs, dim=-1))
        return self._multiply(x, down, expert, "down_proj")[: len(rows)]

    def _multiply(self, x: torch.Tensor, weight: Matrix, expert: int, name: str) -> torch.Tensor:
        bias = getattr(self._module, f"{name}_bias")[expert] if self._module.has_bias else None
        if not isinstance(weight, torch.Tensor):
            return weight.multiply(x, bias)
        if self._is_transposed:
            return torch.addmm(x.new_zeros(weight.shape[1]) if bias is None else bias, x, weight)
        return linear_of(weight.dtype)(x[None], weight, bias)[0]


def _run_experts(
    module: Any, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run the module's ExpertsRunner; the signature is transformers' ExpertsInterface."""
    return module.experts_runner(hidden, experts, weights)


ALL_EXPERTS_FUNCTIONS.register(ONE_BY_ONE, _run_experts)
