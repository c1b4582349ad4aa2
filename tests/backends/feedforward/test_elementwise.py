"""Row-wise activation functions: an element's bits do not depend on its place in the tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from backends.feedforward.elementwise import batch_invariant_activations, unsteady_function

NAMES = ("gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "relu", "relu2", "quick_gelu", "swish")


def alone(function, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(row[None]) for row in rows])


def model_with(name: str) -> nn.Module:
    model = nn.Sequential(ACT2FN[name], nn.Linear(3, 3))
    batch_invariant_activations(model)
    return model[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [44, 704, 11008])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_rows_together_have_the_bits_of_rows_alone(name, dtype, width, n_threads) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    function = model_with(name)
    rows = torch.randn(19, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        together = function(rows[None])[0]
        assert torch.equal(together, alone(function, rows))
        assert together.is_contiguous()
        assert torch.allclose(together.float(), ACT2FN[name](rows.float()), atol=0.02, rtol=0.02)
    finally:
        torch.set_num_threads(before)


def test_as_they_are_they_differ() -> None:
    rows = torch.randn(400, 44, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(nn.functional.silu(rows), alone(nn.functional.silu, rows))


class Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)


class OfAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.act_fn(x)


def test_functions_that_a_family_calls_by_itself_are_found(monkeypatch) -> None:
    """Beam gates its attention with plain functions: no module could be given another forward."""
    for kind in (Gated, OfAModule):
        monkeypatch.setattr(kind, "__module__", "transformers.models.own.modeling_own")
    assert unsteady_function(Gated()) == "sigmoid"
    assert unsteady_function(OfAModule()) is None
    given_another = Gated()
    given_another.forward = torch.relu
    assert unsteady_function(given_another) is None
