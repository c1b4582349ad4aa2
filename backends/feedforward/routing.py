"""Routers of mixtures of experts, recognised by their structure."""

from __future__ import annotations

from torch import nn

from backends.feedforward.elementwise import calls

_LINEAR = frozenset({"linear"})


def is_router(module: nn.Module) -> bool:
    """Return whether a module of a family multiplies rows by its own `weight` [experts, hidden] in
    code of its own, to choose experts by the outputs."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2 and calls(module, _LINEAR)
