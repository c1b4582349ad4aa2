"""DFlashSource: a DFlash head and the target that it runs beside, for the planner and loading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from transformers.configuration_utils import PreTrainedConfig

from backends.checkpoint.config import config_faults
from backends.checkpoint.matching import TensorMatch, known_tensors
from backends.checkpoint.quantised import packed_tensors
from backends.checkpoint.skeleton import build_own_model
from backends.contract.backend import (
    LAST_HIDDEN_STATE,
    Backend,
    BackendError,
    MaskedBlock,
    UnsupportedModel,
)
from backends.contract.shares_weights import SharesWeights
from backends.contract.source import BackendOptions, Loading, ModelCompute
from backends.heads.dflash.config import BlockSettings, check_fits, load_dflash_config
from backends.heads.dflash.gguf_file import gguf_config, named_tensors, rope_factors
from backends.heads.dflash.model import DFlashDraftModel
from backends.heads.gguf_tensors import DecodedWeights, decoded_records, head_dtype
from backends.heads.target import HeadTarget
from backends.hf.loading import bind_checkpoint, main_dtype
from backends.hf.model import HfModel
from backends.hf.source import HfSource
from backends.hf.weights import TorchWeights
from backends.packed.tensor import PackedTensor
from offload.formats.checkpoint import WeightIndex
from offload.formats.fingerprint import fingerprint
from offload.formats.gguf_index import GgufIndex
from offload.formats.tensors import TensorIndex, TensorRecord

_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Names of transformers' layout, and ours."""
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that are the target's."""
_CODEBOOK = re.compile(r"(?<=_codebook)\.weight$")
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class DFlashFiles:
    """A head in its files."""

    config: PreTrainedConfig
    index: TensorIndex
    dtype: torch.dtype
    """Number format that it is computed in."""
    records: Mapping[str, TensorRecord]
    """Tensors by their names in folders."""
    packed: Mapping[str, PackedTensor]
    stored: Mapping[str, TensorRecord] | None = None
    """Tensors of a GGUF file, by the same names, from which `records` are decoded."""
    rope_factors: torch.Tensor | None = None
    """Divisors of RoPE's frequencies, float32 [head_dim / 2]."""


@dataclass(frozen=True)
class DFlashHead(HfModel):
    """A head on the meta device, matched to its files."""

    block: BlockSettings | None = None
    files: DFlashFiles | None = None

    def window(self, layer: int) -> int | None:
        assert self.block is not None
        return self.block.windows[layer]

    def looks_ahead(self, layer: int) -> bool:
        assert self.block is not None
        return self.block.looks_ahead[layer]


def load_dflash_head(target: HeadTarget, path: Path) -> DFlashHead:
    """Build the head of a folder or a GGUF file on the meta device, with the target's embedding and
    output head, and match its tensors.

    Raises UnsupportedModel where it is the head of another target, or of another kind.
    """
    files = _open_gguf(path, target.dtype) if path.is_file() else _open_folder(path)
    config = files.config
    check_fits(path, config, target)
    target.check_layers(_target_layers(BlockSettings.of(config), target), path)
    config.vocab_size = target.vocab_size
    with config_faults(path):  # a folder's values may be of any type; a GGUF file's are checked
        model = build_own_model(DFlashDraftModel, config, files.dtype)
    if files.rope_factors is not None:
        model.rotary_emb.inv_freq /= files.rope_factors
    match = TensorMatch(_by_parameter(files.records, model, path), {})
    head = bind_checkpoint(model, files.index, files.dtype, path, files.packed, match)
    model.share(target.embedding(files.dtype), target.output_head())
    values = {field.name: getattr(head, field.name) for field in fields(HfModel)}
    return DFlashHead(**values, block=model.block, files=files)


def _open_folder(directory: Path) -> DFlashFiles:
    config, index = load_dflash_config(directory), WeightIndex.from_directory(directory)
    dtype = main_dtype(index, config, directory)
    packed = packed_tensors(index, config, dtype, directory)
    return DFlashFiles(config, index, dtype, known_tensors(index, packed), packed)


def _open_gguf(path: Path, dtype: torch.dtype | None) -> DFlashFiles:
    """Index the head in a GGUF file; dtype: number format to decode its tensors to, None: see
    `head_dtype`."""
    index = GgufIndex.from_path(path)
    config, stored = gguf_config(index, path), named_tensors(index, path)
    factors = rope_factors(index, path, config.head_dim)
    dtype = dtype or head_dtype(stored)
    own = {name: record for name, record in stored.items() if not name.endswith(_OF_TARGET)}
    return DFlashFiles(config, index, dtype, decoded_records(own, dtype), {}, own, factors)


def _target_layers(block: BlockSettings, target: HeadTarget) -> tuple[int, ...]:
    """Return the layers to collect. transformers' last hidden state is normed, and heads are
    trained on transformers' states."""
    last = target.n_layers - 1
    return tuple(LAST_HIDDEN_STATE if i == last else i for i in block.target_layer_ids)


def _by_parameter(
    known: Mapping[str, TensorRecord], model: DFlashDraftModel, path: Path
) -> dict[str, TensorRecord]:
    """Return the tensors by the model's parameters. Raises UnsupportedModel for one that has no
    place in a DFlash head."""
    parameters = dict(model.named_parameters())
    named = {}
    for stored, record in known.items():
        name = stored.removeprefix("model.")
        for start, place in _NAMES.items():
            if name.startswith(start):
                name = place + name.removeprefix(start)
        name = _CODEBOOK.sub("", name)
        if name in parameters:
            named[name] = record
        elif not name.endswith(_OF_TARGET):
            raise UnsupportedModel(
                f"{path} is a draft head of another kind: DFlash has no {stored}: take another "
                "head, or leave -md out"
            )
    return named


class DFlashSource(HfSource, SharesWeights):
    """A DFlash head's folder or GGUF file. Embedding and output head are the target's, and take no
    further memory.

    `load` needs the backend of the target: see `share_weights`.
    """

    def __init__(self, target: HeadTarget, options: BackendOptions, path: Path) -> None:
        super().__init__(path, options, partial(load_dflash_head, target))
        self.can_use_gpu = False  # not tried
        width = len(self.block.target_layer_ids) * self.model.config.hidden_size
        self.hidden_state_bytes = _FLOAT32_BYTES * width
        self.warnings = ()
        self.target_layers, self._target = _target_layers(self.block, target), target
        self._owner: Backend | None = None

    @property
    def block(self) -> BlockSettings:
        assert isinstance(self.model, DFlashHead)
        assert self.model.block is not None
        return self.model.block

    @property
    def _files(self) -> DFlashFiles:
        assert isinstance(self.model, DFlashHead)
        assert self.model.files is not None
        return self.model.files

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner
        self._target.bind(owner)

    def fingerprint(self) -> str:
        files = self._files
        if files.stored is None:
            return super().fingerprint()
        return fingerprint(files.index.values(), f"{files.config.to_json_string()} {files.dtype}")

    @property
    def head_bytes(self) -> int:
        return self._target.output_bytes or super().head_bytes

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return super().scratch_bytes(ctx_size, max(max_num_tokens, self.block.size), max_nodes)

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return super().kv_bytes(ctx_size, max(max_nodes, self.block.size))

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        compute = self._target.with_output_head(super().measure_compute(beside_reads))
        return replace(compute, block_size=self.block.size)

    def _load(self, loading: Loading) -> Backend:
        if self._owner is None:
            raise BackendError("a draft head is loaded after its target")
        n_nodes = max(loading.max_nodes, self.block.size)
        backend = super()._load(replace(loading, max_nodes=n_nodes))
        self._owner.collect_hidden_states(self.target_layers)
        backend.takes_hidden_states = True
        second = self.block.second
        top_k = 0 if second is None else second.top_k
        backend.masked_block = MaskedBlock(self.block.size, self.block.mask_token_id, top_k)
        if top_k:
            backend.collect_hidden_states([LAST_HIDDEN_STATE])
        return backend

    def _weights(self, loading: Loading) -> TorchWeights:
        stored = self._files.stored
        return super()._weights(loading) if stored is None else DecodedWeights(self.model, stored)
