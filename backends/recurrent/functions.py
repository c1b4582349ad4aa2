"""Functions that take the place of transformers' own while a pass of specdec runs.

transformers' recurrent layers share an interface: they convolve by `causal_conv1d_fn` and scan by a
function of their kind, both named in the module of their family, and keep states in the cache. The
functions here give the same to the running pass; outside of one they call transformers' own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from backends.contract.backend import UnsupportedModel
from backends.feedforward.elementwise import calls
from backends.packed.kernels import has_numba
from backends.recurrent.convolution import Convolution
from backends.recurrent.delta import delta_rule
from backends.recurrent.mamba import Mamba1, Mamba2
from backends.recurrent.passes import RecurrentPass, current_pass

Function = Callable[..., Any]
_MIXER_CALLS = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of the cache that recurrent layers call."""
_CACHES = frozenset("past_key_values past_key_value cache_params state use_cache".split())
"""Arguments by which the modules of families are given something to remember."""
_STEP_OF_RULE = {
    "torch_chunk_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention": "recurrent_kimi_delta_attention",
}


def use_recurrences(model: PreTrainedModel, layers: Sequence[nn.Module]) -> frozenset[int]:
    """Make the recurrent layers of a model compute within passes; return which layers these are.

    Raises UnsupportedModel for a kind that is not known.
    """
    kind = model.config.model_type
    recurrent = set()
    for index, layer in enumerate(layers):
        modules = list(layer.modules())
        for module in modules:
            if is_mixer(module):
                _replace_functions(kind, module)
                recurrent.add(index)
        has_attention = any("Attention" in type(module).__name__ for module in modules)
        if index not in recurrent and not has_attention:
            _refuse_other_states(kind, modules[1:])
    return frozenset(recurrent)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module keeps a recurrent state in transformers' cache."""
    return calls(module, _MIXER_CALLS)


def _refuse_other_states(model_type: str, modules: Sequence[nn.Module]) -> None:
    """Raise UnsupportedModel if one of a layer's modules takes a cache, in a layer that has neither
    attention nor a recurrence of a known kind."""
    for module in modules:
        if _CACHES & signature(module.forward).parameters.keys():
            raise UnsupportedModel(
                f"{model_type} is not supported: {type(module).__name__} keeps a state that cannot "
                "be rolled back; take a GGUF file of it"
            )


def _replace_functions(model_type: str, module: nn.Module) -> None:
    family = sys.modules[type(module).__module__]
    scans = [name for name in (*_STEP_OF_RULE, *_SCANS) if hasattr(family, name)]
    has_unknown_scan = not scans and calls(module, frozenset({"update_recurrent_state"}))
    if not hasattr(family, "causal_conv1d_fn") or has_unknown_scan:
        raise UnsupportedModel(
            f"{model_type} is not supported: {type(module).__name__} has a recurrent state of a "
            "kind of its own; take a GGUF file of it"
        )
    _replace(family, "causal_conv1d_fn", _convolve)
    for name in scans:
        if name in _SCANS:
            _replace(family, name, _SCANS[name])
        else:
            _replace(family, name, partial(_delta_rule, getattr(family, _STEP_OF_RULE[name])))


def _replace(family: Any, name: str, ours: Callable[..., Any]) -> None:
    own = getattr(family, name)
    if hasattr(own, "outside_of_passes"):
        return

    @wraps(own)
    def function(*args: Any, **kwargs: Any) -> Any:
        recurrent = current_pass()
        return own(*args, **kwargs) if recurrent is None else ours(recurrent, *args, **kwargs)

    function.outside_of_passes = own  # type: ignore[attr-defined]
    setattr(family, name, function)


def _convolve(
    recurrent: RecurrentPass,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Convolve [1, channels, tokens]."""
    output = recurrent.run(Convolution(weight, bias, activation), (hidden_states[0].T,))
    return output.T[None]


def _delta_rule(
    step: Function,
    recurrent: RecurrentPass,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    rule = delta_rule(step, use_qk_l2norm_in_kernel)
    output = recurrent.run(rule, tuple(x[0] for x in (query, key, value, g, beta)))[None]
    return output, output.new_empty(0)  # a state that families convert before they store it


def _mamba2(
    recurrent: RecurrentPass,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    kind = mamba2(A, D, dt_bias, (dt_limit[0], dt_limit[1]))
    return recurrent.run(kind, tuple(x[0] for x in (hidden_states, dt, B, C)))[None], None


def mamba2(
    a: torch.Tensor,
    d: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    limits: tuple[float, float],
) -> Mamba2:
    """Return Mamba-2 in compiled loops if numba is installed, else in torch."""
    if not has_numba():
        return Mamba2(a, d, dt_bias, limits)
    from backends.recurrent.mamba_by_numba import CompiledMamba2

    return CompiledMamba2(a, d, dt_bias, limits)


def _mamba1(
    recurrent: RecurrentPass,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scan [1, channels, tokens]."""
    assert z is not None, "Mamba has a gate"
    rows = tuple(x[0].T for x in (hidden_states, dt, z, B, C))
    return recurrent.run(Mamba1(A, D, delta_bias), rows).T[None], None


_SCANS: dict[str, Function] = {
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
