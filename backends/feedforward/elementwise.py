"""Batch-invariant elementwise functions on a CPU: an element's bits do not depend on its place.

torch computes a remainder of less than a vector, at the end of a tensor or of a thread's part, by
another function: gelu in bf16 then differs for 3 of 1 000 numbers, silu in fp32 for 3 of 100. Which
elements these are depends on the number of rows. So such a function is called for few enough rows
that one thread computes them all, padded to whole vectors.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache, partial, wraps
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from backends.feedforward.records import is_experts

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


def batch_invariant_functions(model: nn.Module) -> None:
    """Make a model's elementwise functions batch-invariant on a CPU: its activation modules, and
    what its other modules call in code of their own."""
    for module in model.modules():
        if type(module).__module__ in _ACTIVATION_MODULES:
            module.forward = by_rows(module.forward)
        elif not is_experts(module) and calls(module, _PLACE_DEPENDENT):
            module.forward = _in_whole_vectors_within(module.forward)


def calls(module: nn.Module, names: frozenset[str]) -> bool:
    """Return whether the class of a transformers module, or a function of its file that it calls,
    calls a function with one of these names."""
    return _class_calls(type(module), names)  # type: ignore[arg-type]


@cache
def _class_calls(own: Any, names: frozenset[str]) -> bool:
    """Cached: parsing takes 0.5 ms, and a model has hundreds of modules of few classes."""
    if not own.__module__.startswith("transformers.models."):
        return False
    beside, seen = vars(sys.modules[own.__module__]), set()
    left: list[Any] = [own]
    while left:
        code = left.pop()
        if code in seen:
            continue
        seen.add(code)
        for function in _called(code):
            if isinstance(function, ast.Attribute) and function.attr in names:
                return True
            if isinstance(function, ast.Name):
                other = beside.get(function.id)
                if inspect.isfunction(other) and other.__module__ == own.__module__:
                    left.append(other)
    return False


def _called(code: Any) -> list[ast.expr]:
    """Return the functions that the source of a class or function calls."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return []
    return [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]


class _WholeVectors(TorchFunctionMode):
    """Computes place-dependent functions in whole vectors while it is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        function = partial(func, **(kwargs or {}))
        is_elementwise = len(args) == 1 and getattr(args[0], "ndim", 0) > 0
        if getattr(func, "__name__", "") in _PLACE_DEPENDENT and is_elementwise:
            return by_rows(function)(args[0])
        return function(*args)


def _in_whole_vectors_within(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def within(*args: Any, **kwargs: Any) -> Any:
        with _WholeVectors():
            return forward(*args, **kwargs)

    return within


def by_rows(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
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
