"""Batch-invariant activation functions on a CPU: an element's bits do not depend on its place.

torch computes a remainder of less than a vector, at the end of a tensor or of a thread's part, by
another function: gelu in bf16 then differs for 3 of 1 000 numbers, silu in fp32 for 3 of 100. Which
elements these are depends on the number of rows. So an activation is called for few enough rows
that one thread computes them all, padded to whole vectors.
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
"""Maximum elements that torch's loops process at a time: two AVX-512 registers of bf16."""
_SERIAL_ELEMENTS = 0x4000
"""Maximum size of a tensor that one thread computes: torch divides gelu above it (others above
0x8000)."""
_ACTIVATION_MODULES = ("transformers.activations", "torch.nn.modules.activation")
_PLACE_DEPENDENT = frozenset(
    "elu gelu hardswish logsigmoid mish selu sigmoid silu softplus".split()
)
"""Functions that depend on an element's place, at least in fp32."""


def batch_invariant_activations(model: nn.Module) -> None:
    """Make a model's activation functions batch-invariant on a CPU."""
    for module in model.modules():
        if type(module).__module__ in _ACTIVATION_MODULES:
            module.forward = _by_rows(module.forward)


def unsteady_function(module: nn.Module) -> str | None:
    """Return a function that depends on an element's place and that a model's code calls itself."""
    own = type(module)
    if not own.__module__.startswith("transformers.models.") or "forward" in vars(module):
        return None
    return _unsteady_call(own.forward)


@cache
def _unsteady_call(forward: Callable[..., Any]) -> str | None:
    """Return the same for the forward of a class. Cached, since parsing takes 0.5 ms and a model
    has hundreds of modules of few classes."""
    try:
        code = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return None
    calls = (node.func for node in ast.walk(code) if isinstance(node, ast.Call))
    names = (func.attr for func in calls if isinstance(func, ast.Attribute))
    return next((name for name in names if name in _PLACE_DEPENDENT), None)


def _by_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        n_missing = -width % _VECTOR_ELEMENTS
        is_batch_invariant = not n_missing and x.numel() <= _SERIAL_ELEMENTS
        if is_batch_invariant or x.device.type != "cpu":  # a GPU has no threads that divide it
            return function(x)
        rows = pad(x.reshape(-1, width), (0, n_missing))
        parts = rows.split(max(1, _SERIAL_ELEMENTS // rows.shape[1]))
        outputs = torch.cat([function(part) for part in parts])
        # Contiguous: a linear layer adds its bias before or after rounding depending on strides.
        return outputs[:, :width].reshape(x.shape).contiguous()

    return forward


def in_whole_vectors(function: Callable[..., Any], width: int) -> Callable[..., Any]:
    """Wrap a function of rows [n, any] so that each call has few enough rows for one thread, padded
    to fill whole vectors.

    width: numbers that the function computes with for each row.
    """
    step = _VECTOR_ELEMENTS // gcd(_VECTOR_ELEMENTS, width)

    def call(x: torch.Tensor) -> Any:
        num_rows = x.shape[0]
        n_steps = -(-num_rows // step)
        n_parts = max(1, -(-n_steps * step * width // _SERIAL_ELEMENTS))
        rows = pad(x, (0, 0, 0, n_steps * step - num_rows))
        ends = [n_steps * i // n_parts * step for i in range(n_parts + 1)]  # about equal sizes
        outputs = [function(rows[start:end]) for start, end in pairwise(ends)]
        if isinstance(outputs[0], tuple):
            return tuple(torch.cat(parts)[:num_rows] for parts in zip(*outputs, strict=True))
        return torch.cat(outputs)[:num_rows]

    return call
