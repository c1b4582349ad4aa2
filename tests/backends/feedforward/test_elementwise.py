"""Row-wise activation functions: an element's bits do not depend on its place in the tensor."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from backends.feedforward.elementwise import batch_invariant_functions

NAMES = ("gelu", "gelu_pytorch_tanh", "gelu_new", "silu", "relu", "relu2", "quick_gelu", "swish")


def alone(function, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([function(row[None]) for row in rows])


def model_with(name: str) -> nn.Module:
    model = nn.Sequential(ACT2FN[name], nn.Linear(3, 3))
    batch_invariant_functions(model)
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
        return x * torch.sigmoid(x) + nn.functional.silu(x) + x.sigmoid()


class OfAFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * gate(x)


class OfAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.act_fn(x)


def gate(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(x.float(), beta=2).to(x.dtype)


@pytest.mark.parametrize("kind", [Gated, OfAFunction, OfAModule])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functions_that_a_family_calls_by_itself(kind, dtype, monkeypatch) -> None:
    """Beam gates its attention with plain functions, Mamba its steps."""
    own = "transformers.models.own.modeling_own"
    monkeypatch.setitem(sys.modules, own, sys.modules[__name__])
    monkeypatch.setattr(kind, "__module__", own)
    monkeypatch.setattr(gate, "__module__", own)
    model = kind()
    batch_invariant_functions(model)
    rows = torch.randn(400, 44, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(model(rows), alone(model, rows))
    assert torch.allclose(model(rows).float(), kind()(rows).float(), atol=0.02, rtol=0.02)


def test_without_that_they_differ() -> None:
    rows = torch.randn(400, 44, generator=torch.Generator().manual_seed(0))
    for kind in (Gated, OfAFunction):
        assert not torch.equal(kind()(rows), alone(kind(), rows))
