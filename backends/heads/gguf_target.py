"""GgufTarget: a GGUF model on llama.cpp as the target of a draft head on torch.

A head shares the target's embedding and output head without a copy of either: rows of the embedding
are read from the file and decoded when tokens need them, and logits are products with the output
head where llama.cpp has it, in the file's number format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from backends.contract.backend import (
    LAST_HIDDEN_STATE,
    Backend,
    BackendError,
    UnsupportedModel,
)
from backends.contract.source import ModelCompute
from backends.ggml.nextn import hidden_state_functions
from backends.ggml.products import GgmlProducts
from backends.gguf.heads import TRIED_HEADS, model_output_record
from backends.heads.gguf_tensors import StoredEmbedding
from backends.heads.target import HeadTarget
from backends.llama.base import GgufBackend
from backends.llama.source import GgufSource, measure_formats
from offload.formats.tensors import TensorRecord
from offload.process.cpus import usable_cpus

_SCALED = frozenset("gemma gemma2 gemma3 gemma3n gemma4".split())
"""Architectures whose embeddings are multiplied by sqrt(hidden) in llama.cpp's graph, and by the
embedding itself in transformers."""


class StoredOutputHead(nn.Module):
    """Output head of a loaded GGUF model: [..., hidden] -> float32 logits [..., vocab_size]."""

    def __init__(self, vocab_size: int, n_threads: int) -> None:
        super().__init__()
        self.vocab_size, self._n_threads = vocab_size, n_threads
        self._products = GgmlProducts()
        self._owner: GgufBackend | None = None

    def bind(self, owner: GgufBackend) -> None:
        self._owner = owner

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        weight = None if self._owner is None else self._owner.output_weight
        if weight is None:
            raise BackendError("a draft head computes logits after a pass of its target alone")
        rows = hidden_states.detach().float().reshape(-1, hidden_states.shape[-1]).contiguous()
        logits = torch.empty((len(rows), self.vocab_size))
        shape = (rows.shape[0], rows.shape[1])
        self._products.multiply_with(
            weight, rows.data_ptr(), logits.data_ptr(), shape, self._n_threads
        )
        return logits.view(*hidden_states.shape[:-1], self.vocab_size)


class GgufTarget(HeadTarget):
    """See HeadTarget. Heads are computed in their own number format.

    n_threads: threads of products with the output head; None: as many as there are processors.
    """

    dtype = None

    def __init__(self, source: GgufSource, n_threads: int | None) -> None:
        self._source, self._model = source, source.model
        self.hidden_size, self.n_layers = self._model.hidden_size, self._model.n_layers
        self.vocab_size = self._model.vocab_size
        self._n_threads = n_threads or usable_cpus()
        self._output = StoredOutputHead(self.vocab_size, self._n_threads)
        self.output_bytes = model_output_record(self._model).n_bytes

    def embedding(self, dtype: torch.dtype) -> nn.Module:
        is_scaled = self._model.architecture in _SCALED
        scale = math.sqrt(self.hidden_size) if is_scaled else 1.0
        return StoredEmbedding(self._model.index["token_embd.weight"], dtype, scale)

    def output_head(self) -> nn.Module:
        return self._output

    def is_embedding(self, record: TensorRecord) -> bool:
        return False  # its bytes are of another layout or number format

    def check_layers(self, layers: Sequence[int], head: Path) -> None:
        model, available = self._model, self._source.trial.output_layers
        lacking = sorted(set(layers) - {LAST_HIDDEN_STATE, *available})
        if LAST_HIDDEN_STATE in layers:
            hidden_state_functions()
            if model.architecture not in TRIED_HEADS:
                lacking.append(self.n_layers - 1)
        if lacking:
            raise UnsupportedModel(
                f"{head} takes outputs of the layers {lacking} of its target, which llama.cpp does "
                f"not show for {model.path} ({model.architecture}): name a draft model, or leave "
                "-md out"
            )

    def with_output_head(self, compute: ModelCompute) -> ModelCompute:
        records = [model_output_record(self._model)]
        return replace(compute, head_per_byte=measure_formats(records, self._n_threads, None))

    def bind(self, owner: Backend) -> None:
        if not isinstance(owner, GgufBackend):
            raise BackendError("a draft head is loaded after its target")
        self._output.bind(owner)
