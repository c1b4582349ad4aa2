"""One forward pass of a transformers model through its layer runners."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from backends.attention.blocked_mask import blocked_mask
from backends.attention.blocks import ProductLimits
from backends.attention.interface import KEYS_BY_ROW
from backends.attention.masks import additive_mask, segmented_mask
from backends.attention.scores import Scratch
from backends.contract.backend import UnsupportedModel, one_line
from backends.hf.hidden_states import HiddenStates
from backends.hf.layer_runner import MakeMask
from backends.hf.model import HfModel
from backends.kv.pool import KvPool
from offload.errors import SpecdecError


def prepare_buffers(model: HfModel, device: torch.device) -> torch.Tensor | None:
    """Move buffers that are neither weight nor activation (`inv_freq`) to the device.

    Returns the slopes [heads] of a model with ALiBi positions.
    """
    for module in model.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return _alibi_slopes(model, device)


def mask_maker(model: HfModel, device: torch.device, limits: ProductLimits) -> MakeMask:
    """Return the function that builds the masks for a model's attention on a device."""
    if model.takes_blocks and device.type == "cpu":
        is_of_cache = model.takes_whole_cache
        return partial(blocked_mask, limits=limits, scratch=Scratch(), is_of_cache=is_of_cache)
    make = segmented_mask if model.attention == KEYS_BY_ROW else additive_mask
    return partial(make, dtype=model.dtype, device=device)


@contextmanager
def first_pass(model: HfModel, device: torch.device) -> Iterator[None]:
    """Turn an error in the first pass of a model into UnsupportedModel.

    Some values of a config are not checked before the family's code computes with them: a negative
    scale, more groups of experts than there are. On a GPU the error is raised as it is, since
    memory may have run out.
    """
    try:
        yield
    except (SpecdecError, MemoryError, OSError):
        raise
    except Exception as e:
        if device.type != "cpu":
            raise
        raise UnsupportedModel(
            f"the first pass of the {model.config.model_type} model failed ({type(e).__name__}: "
            f"{one_line(e)}): fix its config.json, or take a GGUF file of it (--debug shows where)"
        ) from e


def run_model(
    model: HfModel,
    cache: KvPool,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    logit_rows: torch.Tensor,
    hidden_states: HiddenStates | None = None,
    given_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return logits [rows, vocab] of `logit_rows` for tokens and positions [1, n].

    hidden_states: keeps hidden states of the pass.
    given_states: [n, width] for the embedding of a draft head.
    """
    if given_states is not None:
        model.model.get_input_embeddings().hidden_states = given_states
    noting = (
        hidden_states.noting_last(model.model.get_decoder()) if hidden_states else nullcontext()
    )
    with noting, _rows_of_head(model.model, logit_rows) as options:
        output = model.model(
            input_ids=token_ids,
            position_ids=positions,
            # transformers passes a mask of four dimensions to the layers unchanged; each layer's
            # runner replaces it by the real mask.
            attention_mask=torch.zeros((1, 1, 1, 1), dtype=model.dtype, device=token_ids.device),
            past_key_values=cache,
            use_cache=True,
            **options,
        )
    logits: torch.Tensor = output.logits[0]
    return logits


class BodyOutput:
    """Output of the part of a model below its head in a pass, for logits of more tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._body: Any = None
        self._output: Any = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the output of a pass inside."""
        # Some families' code calls the base model, some the decoder in it: the outer one ends last.
        embeddings = self._model.get_input_embeddings()
        parts = {part for part in self._model.children() if embeddings in part.modules()}
        parts |= {self._model.get_decoder()} - {self._model}
        hooks = [part.register_forward_hook(self._note) for part in parts]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, body: Any, inputs: Any, output: Any) -> None:
        self._body, self._output = body, output

    def logits(self, logit_rows: torch.Tensor) -> torch.Tensor:
        """Return logits [rows, vocab] of these tokens of the pass, by the family's own code."""
        body, output = self._body, self._output
        body.forward = lambda *args, **kwargs: output  # hides the class's
        # Gemma 4 takes the rows of its head only from as many states as there are tokens.
        token_ids = logit_rows.new_zeros(1, output[0].shape[1])
        try:
            with _rows_of_head(self._model, logit_rows) as options:
                logits: torch.Tensor = self._model(input_ids=token_ids, **options).logits[0]
        finally:
            del body.forward
        return logits


@contextmanager
def _rows_of_head(model: PreTrainedModel, logit_rows: torch.Tensor) -> Iterator[dict[str, Any]]:
    """Yield the options with which a model computes logits of these rows alone; the head of a
    family that has no such option is given these rows."""
    if _has_logits_to_keep(type(model).__module__):
        yield {"logits_to_keep": logit_rows}
        return
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda head, inputs: (inputs[0].index_select(1, logit_rows),)
    )
    try:
        yield {}
    finally:
        hook.remove()


@cache
def _has_logits_to_keep(family: str) -> bool:
    return "logits_to_keep" in inspect.getsource(sys.modules[family])


def _alibi_slopes(model: HfModel, device: torch.device) -> torch.Tensor | None:
    """Return the slopes [heads] of a model with ALiBi; its own bias becomes a placeholder."""
    base = model.model.base_model
    build = getattr(base, "build_alibi_tensor", None)
    if build is None:
        return None
    if hasattr(build, "slopes"):  # already replaced by an earlier backend
        known: torch.Tensor = build.slopes
        return known.to(device)
    ones = torch.ones(1, 2)
    bias = base.build_alibi_tensor(ones, model.config.num_attention_heads, torch.float32)
    slopes = bias[:, 0, 1] - bias[:, 0, 0]  # the bias grows by the slope with each position

    def placeholder(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(1)

    placeholder.slopes = slopes  # type: ignore[attr-defined]
    base.build_alibi_tensor = placeholder
    return slopes.to(device)
