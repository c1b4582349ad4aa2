"""Tensor formats of llama-quantize, for each of its file types.

The rules are those of `llama_tensor_get_type` and `tensor_type_fallback` in llama.cpp's
llama-quant.cpp, without an importance matrix (no file type here demands one).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.synth.formats import (
    BF16,
    F16,
    F32,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    WeightFormat,
)
from bench.synth.growth import GrowthPlanner
from bench.synth.hybrid import MTP_LAYER, tensor_plans
from bench.synth.nemotron import NemotronPlanner
from bench.synth.shapes import LlamaShape
from bench.synth.tensors import EXPERTS, TensorPlan

TABLES = (GrowthPlanner.embedding, NemotronPlanner.embedding)
Rule = Callable[[int, LlamaShape], WeightFormat]
"""Function (layer index, model shape) -> format."""

_LAYERS_OF_70B = 80
_LARGE_GROUP = 4  # query heads per key/value head: V is small, so better formats cost little
_LAYER_NAME = re.compile(
    r"(?:model|backbone)\.layers\.(\d+)\.(.*?)(?:\.experts\.\d+)?\.(\w+)\.weight"
)
_AS_FLOAT32 = (
    "mlp.gate",
    "mlp.shared_expert_gate",
    "linear_attn.conv1d",
    "mixer.gate",
    "mixer.conv1d",
)
"""Matrices that llama-quantize leaves alone."""
# For rows that are no multiple of the block; F16 for blocks of 32.
_FALLBACKS = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, IQ4_XS: IQ4_NL}


@dataclass(frozen=True)
class Recipe:
    """Recipe of one file type."""

    file_type: str  # general.file_type: a name of gguf.LlamaFileType
    form: WeightFormat  # of matrices without a rule
    head: WeightFormat  # of the output head, which a tied embedding is too
    attn_v: Rule | None = None
    ffn_down: Rule | None = None
    experts: WeightFormat | None = None  # if it differs from other matrices

    def format_of(self, grown: LlamaShape, plan: TensorPlan) -> WeightFormat:
        """Return the format of one tensor of a model."""
        if len(plan.shape) == 1:
            return F32
        return _fitting_format(self._preferred(grown, plan.name), plan.shape[-1])

    def _preferred(self, grown: LlamaShape, name: str) -> WeightFormat:
        if name in (TABLES if grown.tied else ("lm_head.weight",)):
            return self.head
        match = _LAYER_NAME.fullmatch(name.replace(MTP_LAYER, f"model.layers.{grown.n_layers}."))
        kind = f"{match[2]}.{match[3]}" if match else ""
        if kind in _AS_FLOAT32:
            return F32
        if self.experts is not None and EXPERTS in name:
            return self.experts
        rules = {
            "self_attn.v_proj": self.attn_v,
            "mlp.down_proj": self.ffn_down,
            "mlp.shared_expert.down_proj": self.ffn_down,
            "linear_attn.in_proj_qkv": self.attn_v,
            "mixer.v_proj": self.attn_v,
            "mixer.down_proj": self.ffn_down,
            "mixer.shared_experts.down_proj": self.ffn_down,
        }
        rule = rules.get(kind)
        if match is None or rule is None:
            return self.form
        layer = int(match[1])
        if kind == "mixer.v_proj":  # llama-quantize counts the layers that have values
            kinds = "".join(map(grown.kind_of, range(grown.n_layers)))
            layer, grown = kinds[:layer].count("*"), replace(grown, n_layers=kinds.count("*"))
        return rule(layer, grown)

    @property
    def block_size(self) -> int:
        return self.form.block_size

    def model_bytes(self, shape: LlamaShape) -> int:
        """Return the bytes of all weights of a model of this shape."""
        plans = tensor_plans(shape, shape, for_gguf=True)
        return sum(self.format_of(shape, plan).n_bytes(plan.n_weights) for plan in plans)


def _fitting_format(form: WeightFormat, n_columns: int) -> WeightFormat:
    """Return the format, or one of smaller blocks if the rows are no multiple of its block."""
    fitting = (f for f in (form, _FALLBACKS.get(form, F16)) if n_columns % f.block_size == 0)
    return next(fitting, F16)


def _uses_more_bits(layer: int, n_layers: int) -> bool:
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _q4_k_attn_v(shape: LlamaShape) -> WeightFormat:
    is_70b = shape.n_layers == _LAYERS_OF_70B and shape.n_heads != shape.n_kv_heads
    return Q5_K if is_70b else Q4_K


def _q4_k_s_attn_v(layer: int, shape: LlamaShape) -> WeightFormat:
    return Q5_K if layer < 4 else _q4_k_attn_v(shape)


def _q4_k_m_attn_v(layer: int, shape: LlamaShape) -> WeightFormat:
    return Q6_K if _uses_more_bits(layer, shape.n_layers) else _q4_k_attn_v(shape)


def _iq4_xs_attn_v(layer: int, shape: LlamaShape) -> WeightFormat:
    return Q5_K if shape.n_heads // shape.n_kv_heads >= _LARGE_GROUP else IQ4_XS


def _first_eighth(better: WeightFormat, form: WeightFormat) -> Rule:
    return lambda layer, shape: better if layer < shape.n_layers // 8 else form


def _more_bits(better: WeightFormat, form: WeightFormat) -> Rule:
    return lambda layer, shape: better if _uses_more_bits(layer, shape.n_layers) else form


# The first is the default.
RECIPES = {
    "q4_0": Recipe("MOSTLY_Q4_0", Q4_0, Q6_K),
    "q4_k_s": Recipe("MOSTLY_Q4_K_S", Q4_K, Q6_K, _q4_k_s_attn_v, _first_eighth(Q5_K, Q4_K)),
    "q4_k_m": Recipe("MOSTLY_Q4_K_M", Q4_K, Q6_K, _q4_k_m_attn_v, _more_bits(Q6_K, Q4_K)),
    "q5_k_s": Recipe("MOSTLY_Q5_K_S", Q5_K, Q6_K),
    "q5_k_m": Recipe(
        "MOSTLY_Q5_K_M",
        Q5_K,
        Q6_K,
        _more_bits(Q6_K, Q5_K),
        _more_bits(Q6_K, Q5_K),
    ),
    "q6_k": Recipe("MOSTLY_Q6_K", Q6_K, Q6_K),
    "iq4_xs": Recipe("MOSTLY_IQ4_XS", IQ4_XS, Q6_K, _iq4_xs_attn_v, _first_eighth(Q5_K, IQ4_XS)),
    "mxfp4": Recipe("MOSTLY_MXFP4_MOE", Q8_0, Q8_0, experts=MXFP4),
    "q8_0": Recipe("MOSTLY_Q8_0", Q8_0, Q8_0),
    "f16": Recipe("MOSTLY_F16", F16, F16),
    "bf16": Recipe("MOSTLY_BF16", BF16, BF16),
    "fp32": Recipe("ALL_F32", F32, F32),
}
