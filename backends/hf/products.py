"""The distinct matrix products of a model on torch, for the self-test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from backends.checkpoint.records import packed_by_module, packed_module
from backends.feedforward.linear import MIN_OUTPUTS, is_plain
from backends.feedforward.records import is_experts, stacked_parts
from backends.feedforward.routing import is_router
from backends.hf.model import HfModel
from backends.recurrent.functions import is_mixer

_TRIED_OUTPUTS = 128
"""Maximum number of outputs to try of a matrix: the choice of kernel depends on the number of rows,
the number of terms, and whether outputs fill whole vectors."""


@dataclass(frozen=True, order=True)
class Product:
    """A linear layer; `n_out` may be less than its real number of outputs.

    is_transposed: the weights are [in, out], as in GPT-2.
    is_float32: computed in float32, whatever the model's dtype.
    is_torch: always computed by torch, as the family's code does for routers.
    is_left: the weights are the left factor and tokens are columns, as for Mamba's time steps.
    """

    n_in: int
    n_out: int
    has_bias: bool
    is_transposed: bool
    is_float32: bool = False
    is_torch: bool = False
    is_left: bool = False


class UnknownProduct(Exception):
    """Raised for a module with computations of its own that the self-test does not know."""


def products_of(model: HfModel) -> Iterator[Product]:
    packed = _packed_products(model)
    for part in (*model.layers, *_non_layer_linears(model)):
        for module in part.modules():
            steps = getattr(module, "dt_proj", None)
            if isinstance(steps, nn.Linear) and is_mixer(module):
                n_out, n_in = steps.weight.shape
                yield Product(n_in, _n_tried(n_out), False, False, is_torch=True, is_left=True)
            if is_experts(module):
                if id(module) not in packed:
                    yield from products_of_experts(module)
                continue
            weight = getattr(module, "weight", None)
            if weight is None or weight.ndim < 2:
                continue
            if is_router(module):
                n_out, n_in = weight.shape
                yield Product(n_in, n_out, hasattr(module, "bias"), False, is_torch=True)
                yield Product(n_in, n_out, False, False, is_float32=True)  # in some families
                continue
            if isinstance(module, nn.Conv1d) and any(map(is_mixer, part.modules())):
                continue  # its terms are added one after the other, for any number of rows
            if id(module) not in packed:
                yield _product_of_linear(module)


def _product_of_linear(module: nn.Module) -> Product:
    if not isinstance(module, nn.Linear | Conv1D):
        raise UnknownProduct(f"{type(module).__name__} multiplies in code of its own")
    is_transposed = isinstance(module, Conv1D)
    n_in, n_out = module.weight.shape if is_transposed else module.weight.shape[::-1]
    n_tried = _n_tried(n_out if n_out > 1 else MIN_OUTPUTS)
    is_torch = not is_transposed and not is_plain(module)
    return Product(n_in, n_tried, module.bias is not None, is_transposed, is_torch=is_torch)


def _packed_products(model: HfModel) -> set[int]:
    """Return the ids of the linear layers and experts that are computed from stored bytes: each sum
    has one order, for any number of rows."""
    experts = zip(model.expert_modules, model.expert_matrices, strict=True)
    of_experts = {
        id(module)
        for module, own in experts
        if own and all(matrix.packed for expert in own for matrix in expert)
    }
    return of_experts | {
        id(tensors[0].module)
        for layer in model.layer_tensors
        for tensors in packed_by_module(layer)
        if packed_module(tensors).is_multiplied
    }


def _non_layer_linears(model: HfModel) -> Iterator[nn.Module]:
    """Yield the head and other linear modules outside the layers, such as OPT-350M's project_in."""
    yield model.model.get_output_embeddings()
    inner = {id(module) for layer in model.layers for module in layer.modules()}
    for module in model.model.modules():
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in inner:
            yield module


def products_of_experts(module: nn.Module) -> Iterator[Product]:
    """Yield the products of experts; gate and up may be one product or two."""
    is_transposed, has_bias = bool(module.is_transposed), bool(module.has_bias)
    for weight in (getattr(module, part) for part in stacked_parts(module)):
        n_in, n_out = weight.shape[1:] if is_transposed else weight.shape[:0:-1]
        yield Product(n_in, _n_tried(n_out), has_bias, is_transposed)
        yield Product(n_in, _n_tried(n_out // 2), has_bias, is_transposed)


def _n_tried(n_out: int) -> int:
    return min(n_out, _TRIED_OUTPUTS + n_out % 64)
