"""The matrix products of a model on torch, each kind of them once for its number of terms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from backends.checkpoint.records import packed_by_module, packed_module
from backends.feedforward.elementwise import unsteady_function
from backends.feedforward.records import is_experts
from backends.feedforward.routing import GATE_OUTPUTS, is_router
from backends.hf.model import HfModel
from backends.packed.decoder import pieces

_TRIED_OUTPUTS = 128
"""Outputs to try of a matrix that has more: which kernel is taken depends on the number of rows, on
the number of terms, and on whether outputs fill whole vectors."""


@dataclass(frozen=True, order=True)
class Product:
    """A linear layer, of which not all outputs need be tried.

    is_transposed: as GPT-2 has its weights.
    is_float32: computed so, whatever the model's own format.
    is_torch: computed by torch in any case: routers are, in their families' code.
    """

    n_in: int
    n_out: int
    has_bias: bool
    is_transposed: bool
    is_float32: bool = False
    is_torch: bool = False


class UnknownProduct(Exception):
    """A module that computes in a way of which nothing is known."""


def products_of(model: HfModel) -> Iterator[Product]:
    at_a_time = _outputs_at_a_time(model)
    for part in (*model.layers, *_outer_linears(model)):
        for module in part.modules():
            if is_experts(module):
                yield from products_of_experts(module)
                continue
            if name := unsteady_function(module):
                raise UnknownProduct(f"{type(module).__name__} calls {name}() in code of its own")
            weight = getattr(module, "weight", None)
            if weight is None or weight.ndim < 2:
                continue
            if is_router(module):
                n_out, n_in = weight.shape
                yield Product(n_in, n_out, hasattr(module, "bias"), False, is_torch=True)
                yield Product(n_in, n_out, False, False, is_float32=True)  # in some families
                continue
            if not isinstance(module, nn.Linear | Conv1D):
                raise UnknownProduct(f"{type(module).__name__} multiplies in code of its own")
            is_transposed = isinstance(module, Conv1D)
            n_in, n_out = weight.shape if is_transposed else weight.shape[::-1]
            for n in at_a_time.get(id(module), [n_out]):
                n_tried = _n_tried(n if n > 1 else GATE_OUTPUTS)
                yield Product(n_in, n_tried, module.bias is not None, is_transposed)


def _outputs_at_a_time(model: HfModel) -> dict[int, list[int]]:
    """By the id of a module whose matrix is decoded in pieces: their rows, fewer in the last."""
    return {
        id(tensors[0].module): sorted({end - start for start, end in pieces(module.tensors[0])})
        for layer in model.layer_tensors
        for tensors in packed_by_module(layer)
        if (module := packed_module(tensors)).in_pieces
    }


def _outer_linears(model: HfModel) -> Iterator[nn.Module]:
    """The head, and what is beside the layers: OPT of 350 M makes its embeddings wider."""
    yield model.model.get_output_embeddings()
    inner = {id(module) for layer in model.layers for module in layer.modules()}
    for module in model.model.modules():
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in inner:
            yield module


def products_of_experts(module: nn.Module) -> Iterator[Product]:
    """Gate and up may be one product or two."""
    is_transposed, has_bias = bool(module.is_transposed), bool(module.has_bias)
    for weight in (module.gate_up_proj, module.down_proj):
        n_in, n_out = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
        yield Product(n_in, _n_tried(n_out), has_bias, is_transposed)
        yield Product(n_in, _n_tried(n_out // 2), has_bias, is_transposed)


def _n_tried(n_out: int) -> int:
    return min(n_out, _TRIED_OUTPUTS + n_out % 64)
