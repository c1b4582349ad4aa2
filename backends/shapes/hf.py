"""Shape of a Hugging Face model, from its config and, if present, its safetensors' headers.

transformers builds the modules on the meta device, so every family is counted by the code that
would run it, including mixtures of experts that the torch backend does not run.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from backends.attention.stored_rows import OWN_FORMATS, KvFormats
from backends.checkpoint.architecture import language_config
from backends.checkpoint.config import (
    config_faults,
    context_limit,
    declared,
    is_attention,
    kv_heads,
    load_config,
)
from backends.checkpoint.kinds import refuse_score_head
from backends.checkpoint.matching import TensorMatch, match_config, match_tensors
from backends.checkpoint.quantised import packed_tensors
from backends.checkpoint.records import TORCH_DTYPES
from backends.checkpoint.skeleton import build_model, decoder_layers
from backends.contract.backend import UnsupportedModel
from backends.feedforward.records import experts_per_token
from backends.hf.loading import main_dtype
from backends.hf.model import layer_window
from backends.packed.tensor import PackedTensor
from backends.recurrent.shapes import recurrences_of
from backends.shapes.shape import (
    FFN,
    HEAD,
    OTHER,
    OUTPUT,
    QKV,
    AttentionShape,
    LayerShape,
    Matrix,
    ModelShape,
    StateShape,
)
from offload.formats.checkpoint import WeightIndex
from offload.units import MIB, format_bytes

_FORMATS = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PROCESS_BYTES = 680 * MIB
"""Process memory: memory plans of the large grown mixture have 665 to 688 MiB of base, headroom and
activations."""
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward|moe|expert|fc\d|fc_(in|out)", re.IGNORECASE)
# Names of the output projection of attention in the families.
_OUTPUTS = {"o_proj", "out_proj", "dense", "c_proj", "wo", "out"}


def hf_shape(directory: Path, formats: KvFormats = OWN_FORMATS) -> ModelShape:
    """Read config.json and the headers of any weights; a directory without weights is enough.

    formats: number formats of the KV cache.

    Raises CheckpointError and UnsupportedModel for a model that cannot be read or built.
    """
    config = load_config(directory)
    with config_faults(directory):
        return _shape_of_config(config, directory, formats)


def _shape_of_config(config: PreTrainedConfig, directory: Path, formats: KvFormats) -> ModelShape:
    if any(directory.glob("*.safetensors")):
        index = WeightIndex.from_directory(directory)
        refuse_score_head(directory, index)
        dtype = main_dtype(index, config, directory)
        packed = packed_tensors(index, config, dtype, directory)
        model = build_model(config, dtype)
        match = match_tensors(model, index, packed, directory)
        return shape_of(model, directory, match, _packed_notes(packed), formats)
    dtype, note = _declared_dtype(config)
    notes = [note]
    if getattr(config, "quantization_config", None):
        notes.append("nothing is known of their quantisation: they are smaller than that")
    model = build_model(config, dtype)
    return shape_of(model, directory, match_config(model), tuple(notes), formats)


def shape_of(
    model: PreTrainedModel,
    directory: Path,
    match: TensorMatch,
    notes: tuple[str, ...] = (),
    formats: KvFormats = OWN_FORMATS,
) -> ModelShape:
    """Return the shape of a model on the meta device; tensors not in `match` use its dtype."""
    config, dtype = language_config(model.config), model.dtype
    sizes = _Sizes(match, dtype)
    name, modules = decoder_layers(model)
    states, more_notes = _states(model, modules)
    layers = tuple(
        _layer(model, i, layer, f"{name}.{i}.", sizes, states[i], formats)
        for i, layer in enumerate(modules)
    )
    notes += more_notes
    weight = model.get_output_embeddings().weight
    n_out, n_in = weight.shape
    named: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    head_name = next(key for key, parameter in named.items() if parameter is weight)
    non_layer = {match.shared.get(key, key) for key in named if not key.startswith(name + ".")}
    projections = _projections(model, name + ".", sizes)
    if declared(config, "kv_lora_rank"):
        notes += ("latent attention: keys and values are counted as if expanded for new rows only",)
    return ModelShape(
        path=directory,
        family=config.model_type,
        hidden_size=int(config.hidden_size),
        vocab_size=int(n_out),
        max_context=context_limit(config),
        layers=layers,
        head=Matrix(
            HEAD,
            n_in,
            n_out,
            sizes.n_bytes(head_name, weight),
            _FORMATS[dtype],
        ),
        non_layer_bytes=sum(sizes.n_bytes(key, named[key]) for key in non_layer),
        activation_bytes=dtype.itemsize,
        process_bytes=_PROCESS_BYTES,
        notes=notes,
        projections=tuple(projections),
    )


def _projections(model: PreTrainedModel, layers: str, sizes: _Sizes) -> Iterator[Matrix]:
    """Yield the linear modules beside the layers, without the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        is_beside = module is not head and not name.startswith(layers)
        if is_beside and isinstance(module, nn.Linear | Conv1D):
            n_bytes = sizes.n_bytes(f"{name}.weight", module.weight)
            n_out, n_in = module.weight.shape
            yield Matrix(OTHER, n_in, n_out, n_bytes, _FORMATS[model.dtype])


def _packed_notes(packed: Mapping[str, PackedTensor]) -> tuple[str, ...]:
    """Return a note on the stored and decoded sizes for each packing scheme."""
    notes = []
    for scheme in sorted({tensor.record.scheme for tensor in packed.values()}):
        same = [tensor for tensor in packed.values() if tensor.record.scheme == scheme]
        n_bytes = sum(tensor.record.n_bytes for tensor in same)
        decoded_bytes = sum(tensor.decoded_bytes for tensor in same)
        notes.append(
            f"{len(same)} matrices are stored as {scheme}: {format_bytes(n_bytes)} for "
            f"{format_bytes(decoded_bytes)} of {same[0].record.dtype}"
        )
    return tuple(notes)


class _Sizes:
    """Sizes of parameters in the checkpoint."""

    def __init__(self, match: TensorMatch, dtype: torch.dtype) -> None:
        self._match = match
        self._dtype = dtype

    def n_bytes(self, name: str, parameter: torch.Tensor) -> int:
        """Return the stored bytes; the size in the model's dtype if the checkpoint has no such
        tensor (experts, which transformers stores in another layout)."""
        record = self._match.find(name)
        if record is not None and math.prod(record.shape) == parameter.numel():
            return record.n_bytes
        return parameter.numel() * self._dtype.itemsize


def _declared_dtype(config: PreTrainedConfig) -> tuple[torch.dtype, str]:
    dtype = getattr(config, "dtype", None)
    if dtype in _FORMATS:
        return dtype, f"no weights here: counted as {_FORMATS[dtype]}, which the config names"
    return torch.bfloat16, "no weights here, and the config names no number format: BF16 assumed"


def _layer(
    model: PreTrainedModel,
    number: int,
    layer: nn.Module,
    prefix: str,
    sizes: _Sizes,
    states: Sequence[StateShape],
    formats: KvFormats,
) -> LayerShape:
    config = language_config(model.config)
    kind = _FORMATS[model.dtype]
    matrices = tuple(_matrices(config, layer, prefix, sizes, kind))
    stored = {**dict(layer.named_parameters()), **layer.state_dict()}  # with saved buffers
    n_bytes = sum(sizes.n_bytes(prefix + name, tensor) for name, tensor in stored.items())
    attention = None
    if any(map(is_attention, layer.modules())):
        attention = _attention(config, layer, layer_window(model, number), model.dtype, formats)
    return LayerShape(matrices, attention, n_bytes, tuple(states))


def _states(
    model: PreTrainedModel, layers: Sequence[nn.Module]
) -> tuple[Mapping[int, list[StateShape]], tuple[str, ...]]:
    """Return the recurrent states of each layer that has some, and notes."""
    states: defaultdict[int, list[StateShape]] = defaultdict(list)
    try:
        recurrences = recurrences_of(model, layers)
    except UnsupportedModel as error:
        return states, (f"states of recurrent layers are not counted: {error}",)
    for (layer, _), shape in recurrences.items():
        n_elements = math.prod(shape.state.shape)
        n_inputs = sum(math.prod(spec.shape) for spec in shape.fed)
        n_bytes = shape.state.n_bytes
        states[layer].append(StateShape(n_elements, n_bytes, shape.recurrence.n_products, n_inputs))
    return states, ()


def _matrices(
    config: PreTrainedConfig, layer: nn.Module, prefix: str, sizes: _Sizes, kind: str
) -> Iterator[Matrix]:
    for name, parameter in layer.named_parameters():
        is_convolution = parameter.ndim == 3 and parameter.shape[1] == 1  # of each channel alone
        if parameter.ndim < 2 or name.endswith("bias") or is_convolution:
            continue
        # A Linear has [n_out, n_in], a Conv1D [n_in, n_out]: the counts are the same for both.
        n_out, n_in = parameter.shape[-2:]
        n_matrices = math.prod(parameter.shape[:-2])
        is_expert = parameter.ndim > 2 and "expert" in name
        n_active = experts_per_token(config, n_matrices) if is_expert else n_matrices
        n_bytes = sizes.n_bytes(prefix + name, parameter)
        yield Matrix(_role(name), n_in, n_out, n_bytes, kind, n_matrices, n_active)


def _role(name: str) -> str:
    path = name.split(".")
    if any(_FEED_FORWARD.search(part) for part in path):
        return FFN
    if any(_ATTENTION.search(part) for part in path):
        is_output = any(part in _OUTPUTS for part in path[1:])
        return OUTPUT if is_output else QKV
    return OTHER


def _attention(
    config: PreTrainedConfig,
    layer: nn.Module,
    window: int | None,
    dtype: torch.dtype,
    formats: KvFormats,
) -> AttentionShape:
    n_heads = int(config.num_attention_heads)
    cached = kv_heads(config, layer)
    if declared(config, "kv_lora_rank"):
        key_length = int(config.qk_nope_head_dim + config.qk_rope_head_dim)
        n_kv_heads, value_length = n_heads, int(config.v_head_dim)
    else:
        head_dims = (getattr(module, "head_dim", None) for module in layer.modules())
        head_dim = next(filter(None, head_dims), None) or declared(config, "head_dim")
        key_length = value_length = int(head_dim or config.hidden_size // n_heads)
        n_kv_heads = sum(heads.n_values for heads in cached) // (2 * key_length)
    return AttentionShape(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        key_length=key_length,
        value_length=value_length,
        kv_bytes_per_token=sum(formats.token_bytes(cached, dtype)),
        kv_format=_FORMATS[dtype],
        window=window,
    )
