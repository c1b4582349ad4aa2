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
from backends.contract.self_draft import SharesWeights
from backends.contract.source import BackendOptions, Loading, ModelCompute
from backends.heads.dflash import DFlashDraftModel
from backends.heads.dflash_config import BlockSettings, check_fits, load_dflash_config
from backends.hf.model import HfModel, bind_checkpoint, main_dtype
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


def load_dflash_head(target: HfModel, directory: Path) -> DFlashHead:
    """Build the head of a folder on the meta device, with the target's embedding and output head,
    and match its tensors.

    Raises UnsupportedModel where it is the head of another target, or of another kind.
    """
    config = load_dflash_config(directory)
    vocab_size = target.vocab_size
    check_fits(directory, config, target.config, vocab_size)
    config.vocab_size = vocab_size
    index = WeightIndex.from_directory(directory)
    dtype = main_dtype(index, config, directory)
    model = build_own_model(DFlashDraftModel, config, dtype)
    packed = packed_tensors(index, config, dtype, directory)
    named = _by_parameter(known_tensors(index, packed), model, directory)
    head = bind_checkpoint(model, index, dtype, directory, packed, TensorMatch(named, {}))
    model.share(target.model.get_input_embeddings(), target.model.get_output_embeddings())
    values = {field.name: getattr(head, field.name) for field in fields(HfModel)}
    return DFlashHead(**values, block=model.block)


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

    def __init__(self, target: HfSource, options: BackendOptions, directory: Path) -> None:
        def load(path: Path) -> DFlashHead:
            return load_dflash_head(target.model, path)

        super().__init__(directory, options, load)
        self.can_use_gpu = False  # not tried
        width = len(self.block.target_layer_ids) * self.model.config.hidden_size
        self.hidden_state_bytes = _FLOAT32_BYTES * width
        self.warnings = ()
        self._target = target
        self._owner: Backend | None = None

    @property
    def block(self) -> BlockSettings:
        assert isinstance(self.model, DFlashHead)
        assert self.model.block is not None
        return self.model.block

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return super().scratch_bytes(ctx_size, max(max_num_tokens, self.block.size), max_nodes)

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return super().kv_bytes(ctx_size, max(max_nodes, self.block.size))

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        return replace(super().measure_compute(beside_reads), block_size=self.block.size)

    def _load(self, loading: Loading) -> Backend:
        if self._owner is None:
            raise BackendError("a draft head is loaded after its target")
        n_nodes = max(loading.max_nodes, self.block.size)
        backend = super()._load(replace(loading, max_nodes=n_nodes))
        last = len(self._target.layers) - 1
        # transformers' last hidden state is normed, and heads are trained on transformers' states.
        layers = [LAST_HIDDEN_STATE if i == last else i for i in self.block.target_layer_ids]
        self._owner.collect_hidden_states(layers)
        backend.takes_hidden_states = True
        second = self.block.second
        top_k = 0 if second is None else second.top_k
        backend.masked_block = MaskedBlock(self.block.size, self.block.mask_token_id, top_k)
        if top_k:
            backend.collect_hidden_states([LAST_HIDDEN_STATE])
        return backend
