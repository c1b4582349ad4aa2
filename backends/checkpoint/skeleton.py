"""A transformers model with its parameters on the meta device; buffers (`inv_freq`) are real."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from backends.attention.interface import KEYS_BY_ROW, hands_mask_on
from backends.checkpoint.architecture import attentive_class, language_config, new_model
from backends.checkpoint.buffer_sizes import refuse_absurd_buffers
from backends.contract.backend import UnsupportedModel, one_line
from backends.feedforward.experts import ONE_BY_ONE
from backends.feedforward.llama4 import use_standard_experts
from backends.feedforward.records import refuse_other_mixtures
from offload.errors import SpecdecError
from offload.formats.tensors import CheckpointError

_building = threading.Lock()
"""Lock held while a model is built: building patches state of the process (here torch's
`register_parameter`, in transformers torch's default dtype and initialisers), and Python 3.11 fails
to parse in two threads at once."""
_MAX_PARAMETERS = 2**14
"""More parameters than any model has, with experts stacked; this many are built within seconds."""


def build_skeleton(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a model as `build_model` does; raise UnsupportedModel if it cannot be streamed."""
    model = build_model(config, dtype)
    use_standard_experts(model)
    refuse_other_mixtures(config.model_type, model)
    return model


def build_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model with real buffers and no weights, and our attention if the family can."""
    try:
        with _building, parameters_on_meta():
            refuse_absurd_buffers(config, dtype)
            model = new_model(
                config,
                dtype=dtype,
                attn_implementation=_attention(config),
                experts_implementation=ONE_BY_ONE,
            ).eval()
    except SpecdecError:
        raise
    except Exception as error:  # sizes that contradict each other fail anywhere in the model
        raise CheckpointError(
            f"no {config.model_type} model can be built from the config: {one_line(error)}: "
            "fix the config.json, or download the checkpoint again"
        ) from error
    return model


_Own = TypeVar("_Own", bound=PreTrainedModel)


def build_own_model(kind: type[_Own], config: PreTrainedConfig, dtype: torch.dtype) -> _Own:
    """Build a model of ours as `build_model` does those of transformers; its buffers are small."""
    with _building, parameters_on_meta():
        model: _Own = kind._from_config(config, dtype=dtype, attn_implementation=KEYS_BY_ROW)
    model.eval()
    return model


def _attention(config: PreTrainedConfig) -> str:
    """Return the fastest attention implementation that the family supports."""
    architecture = attentive_class(config)
    softcap = getattr(language_config(config), "attn_logit_softcapping", None)
    if hands_mask_on(architecture, bool(softcap)):  # type: ignore[arg-type]  # classes hash
        return KEYS_BY_ROW
    return "sdpa" if architecture._supports_sdpa and not softcap else "eager"


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move every parameter that this thread registers to the meta device; leave buffers alone.

    Raises CheckpointError once there are more than any model has, from an absurd count in a config.
    """
    register, builder = nn.Module.register_parameter, threading.get_ident()
    n_registered = 0

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        nonlocal n_registered
        register(self, name, param)
        if param is not None and threading.get_ident() == builder:
            n_registered += 1
            if n_registered > _MAX_PARAMETERS:
                raise CheckpointError(
                    f"the config asks for more than {_MAX_PARAMETERS} tensors, which no model has: "
                    "fix the config.json, or download the checkpoint again"
                )
            on_meta = nn.Parameter(param.detach().to("meta"), requires_grad=False)
            # Skips transformers' initialisers, which would cost time without leaving values.
            on_meta._is_hf_initialized = True
            self._parameters[name] = on_meta

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return a pattern of the parameters that transformers loads in float32 beside this dtype."""
    patterns = model._get_dtype_plan(dtype)
    return re.compile("|".join(p.replace("*", ".*") for p in patterns)) if patterns else None


def decoder_layers(model: PreTrainedModel) -> tuple[str, tuple[nn.Module, ...]]:
    """Return the name of the model's list of decoder layers, and the layers."""
    config = language_config(model.config)
    decoder, n_layers = model.get_decoder(), config.num_hidden_layers
    kind = f"{config.model_type} is not supported:"
    inner = [child for child in decoder.children() if isinstance(child, PreTrainedModel)]
    parts = [child for module in (decoder, *inner) for child in module.children()]
    for name, module in model.named_modules():
        is_stack = isinstance(module, nn.ModuleList) and len(module) == n_layers
        if is_stack and any(module is part for part in parts):
            return name, tuple(module)
    raise UnsupportedModel(f"{kind} its {n_layers} layers are not one list in its decoder")
