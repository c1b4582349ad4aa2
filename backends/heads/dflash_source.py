"""DFlashSource: a DFlash head and the target that it runs beside, for the planner and loading."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

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
from backends.heads.dflash import DFlashDraftModel
from backends.heads.dflash_config import BlockSettings, check_fits, load_dflash_config
from backends.heads.target import HeadTarget
from backends.hf.loading import bind_checkpoint, main_dtype
from backends.hf.model import HfModel
from backends.hf.source import HfSource
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import TensorRecord

_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
"""Names of transformers' layout, and ours."""
_OF_TARGET = ("embed_tokens.weight", "lm_head.weight")
"""Ends of the names of tensors that are the target's."""
_CODEBOOK = re.compile(r"(?<=_codebook)\.weight$")
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class DFlashHead(HfModel):
    """A head on the meta device, matched to its checkpoint."""

    block: BlockSettings | None = None

    def window(self, layer: int) -> int | None:
        assert self.block is not None
        return self.block.windows[layer]

    def looks_ahead(self, layer: int) -> bool:
        assert self.block is not None
        return self.block.looks_ahead[layer]


def load_dflash_head(target: HeadTarget, directory: Path) -> DFlashHead:
    """Build the head of a folder on the meta device, with the target's embedding and output head,
    and match its tensors.

    Raises UnsupportedModel where it is the head of another target, or of another kind.
    """
    config = load_dflash_config(directory)
    check_fits(directory, config, target)
    target.check_layers(_target_layers(BlockSettings.of(config), target), directory)
    config.vocab_size = target.vocab_size
    index = WeightIndex.from_directory(directory)
    dtype = main_dtype(index, config, directory)
    model = build_own_model(DFlashDraftModel, config, dtype)
    packed = packed_tensors(index, config, dtype, directory)
    named = _by_parameter(known_tensors(index, packed), model, directory)
    head = bind_checkpoint(model, index, dtype, directory, packed, TensorMatch(named, {}))
    model.share(target.embedding(dtype), target.output_head())
    values = {field.name: getattr(head, field.name) for field in fields(HfModel)}
    return DFlashHead(**values, block=model.block)


def _target_layers(block: BlockSettings, target: HeadTarget) -> tuple[int, ...]:
    """Return the layers to collect. transformers' last hidden state is normed, and heads are
    trained on transformers' states."""
    last = target.n_layers - 1
    return tuple(LAST_HIDDEN_STATE if i == last else i for i in block.target_layer_ids)


def _by_parameter(
    known: Mapping[str, TensorRecord], model: DFlashDraftModel, directory: Path
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
                f"{directory} is a draft head of another kind: DFlash has no {stored}"
            )
    return named


class DFlashSource(HfSource, SharesWeights):
    """A DFlash head's folder. Embedding and output head are the target's, and take no further
    memory.

    `load` needs the backend of the target: see `share_weights`.
    """

    def __init__(self, target: HeadTarget, options: BackendOptions, directory: Path) -> None:
        def load(path: Path) -> DFlashHead:
            return load_dflash_head(target, path)

        super().__init__(directory, options, load)
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

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner
        self._target.bind(owner)

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
