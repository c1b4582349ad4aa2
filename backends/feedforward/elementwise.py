"""Activation functions that give an element the same bits wherever it lies, on a CPU.

torch computes what fills no whole vector, at the end of a tensor or of a thread's part of it, by
another function: of bf16 numbers, gelu then differs in 3 of 1 000, silu in fp32 in 3 of 100. Which
elements these are depends on how many rows there are. So an activation is called for so few rows
that one thread takes them all, of a width that whole vectors fill.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

_VECTOR_ELEMENTS = 64
"""Two registers of AVX-512 of bf16 numbers, which torch's loops take at a time at most."""
_SERIAL_ELEMENTS = 0x4000
"""Of a tensor that one thread takes: torch divides gelu above that (others above 0x8000)."""
_ROOMS = ("transformers.activations", "torch.nn.modules.activation")
_UNSTEADY = frozenset("elu gelu hardswish logsigmoid mish selu sigmoid silu softplus".split())
"""Functions that depend on an element's place, in fp32 at least."""


def batch_invariant_activations(model: nn.Module) -> None:
    """Let a model's activation functions compute rows alike on a CPU, whatever is beside them."""
    for module in model.modules():
        if type(module).__module__ in _ROOMS:
            module.forward = _by_rows(module.forward)


def unsteady_function(module: nn.Module) -> str | None:
    """A function that depends on an element's place, and that a model's own code calls as it is."""
    own = type(module)
    if not own.__module__.startswith("transformers.models.") or "forward" in vars(module):
        return None
    return _unsteady_call(own.forward)


@cache
def _unsteady_call(forward: Callable[..., Any]) -> str | None:
    """The same of a class's forward. Reading its code takes half a millisecond, and a model has
    hundreds of modules of few classes."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    calls = (node.func for node in ast.walk(code) if isinstance(node, ast.Call))
    names = (func.attr for func in calls if isinstance(func, ast.Attribute))
    return next((name for name in names if name in _UNSTEADY), None)


def _by_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        n_missing = -width % _VECTOR_ELEMENTS
        is_batch_invariant = not n_missing and x.numel() <= _SERIAL_ELEMENTS
        if is_batch_invariant or x.device.type != "cpu":  # a GPU has no threads that divide it
            return function(x)
        rows = pad(x.reshape(-1, width), (0, n_missing))
        parts = rows.split(max(1, _SERIAL_ELEMENTS // rows.shape[1]))
        result = torch.cat([function(part) for part in parts])
        # A linear layer adds its bias before or after rounding, as rows lie close or not.
        return result[:, :width].reshape(x.shape).contiguous()

    return forward


def in_whole_vectors(function: Callable[..., Any], width: int) -> Callable[..., Any]:
    """A function of rows [n, any], for so few at a time that one thread takes them, and as many as
    fill whole vectors where a row alone does not.

    width: numbers that it computes with for each row.
    """
    step = _VECTOR_ELEMENTS // gcd(_VECTOR_ELEMENTS, width)

    def call(x: torch.Tensor) -> Any:
        num_rows = x.shape[0]
        n_steps = -(-num_rows // step)
        n_parts = max(1, -(-n_steps * step * width // _SERIAL_ELEMENTS))
        rows = pad(x, (0, 0, 0, n_steps * step - num_rows))
        ends = [n_steps * i // n_parts * step for i in range(n_parts + 1)]  # of about the same size
        result = [function(rows[start:end]) for start, end in pairwise(ends)]
        if isinstance(result[0], tuple):
            return tuple(torch.cat(parts)[:num_rows] for parts in zip(*result, strict=True))
        return torch.cat(result)[:num_rows]

    return call
