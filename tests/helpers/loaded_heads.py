"""Draft heads and their targets, loaded without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends.contract.sequence import SequenceInput, SequenceKV, SequenceOutput
from backends.contract.shares_weights import SharesWeights
from backends.contract.source import BackendOptions, Loading, ModelSource
from backends.heads.dflash.source import DFlashSource
from backends.heads.source import Eagle3Source
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.source import HfSource
from offload.placement.placement import Placement
from offload.placement.plan import plan_placement


def load(source: ModelSource) -> TorchBackend:
    placement = plan_placement(source.layers, 1 << 40)
    loading = Loading(placement, max_context=128, max_nodes=32, max_num_tokens=32)
    backend = source.load(loading)
    assert isinstance(backend, TorchBackend)
    return backend


@contextmanager
def load_eagle3(target: Path, path: Path) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    """Load a checkpoint and a head for it."""
    source = HfSource(target, BackendOptions())
    head = Eagle3Source(path, CheckpointTarget(source.model), BackendOptions())
    with load(source) as backend:
        head.share_weights(backend)
        with load(head) as drafting:
            yield backend, drafting


@contextmanager
def load_dflash(target: Path, path: Path) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    """Load a checkpoint and a DFlash head for it."""
    source = HfSource(target, BackendOptions())
    head = DFlashSource(CheckpointTarget(source.model), BackendOptions(), path)
    with load(source) as backend:
        head.share_weights(backend)
        with load(head) as drafting:
            yield backend, drafting


def run(
    head: TorchBackend,
    sequence: SequenceKV,
    token_ids: Sequence[int],
    states: np.ndarray,
    parents: Sequence[int] | None = None,
) -> SequenceOutput:
    """Run a head over tokens with hidden states; return its logits and states of all of them."""
    everything = range(len(token_ids))
    chunk = SequenceInput(sequence, token_ids, parents, list(everything), everything, states)
    return head.forward([chunk])[0]


def target_states(backend: TorchBackend, token_ids: Sequence[int]) -> np.ndarray:
    """Return the hidden states of a prompt's tokens that were set to be collected."""
    everything = range(len(token_ids))
    chunk = SequenceInput(backend.new_sequence(), token_ids, hidden_states_at=everything)
    return backend.forward([chunk])[0].hidden_states


@contextmanager
def load_beside_gguf(
    target: Path, head: Path, *, is_streamed: bool = False, load_mode: str = "mmap"
) -> Iterator[tuple[Any, TorchBackend]]:
    """Load a GGUF model whose KV cache is float32, and a head for it."""
    from backends.heads.opened import open_head
    from backends.llama.backend import LlamaBackend
    from backends.llama.source import GgufSource

    source = GgufSource(target, BackendOptions(n_threads=1))
    own = open_head(head, source, BackendOptions(n_threads=1))
    assert isinstance(own, SharesWeights)
    layers = source.model.layers
    mode: dict[str, Any] = {"load_mode": load_mode}
    if is_streamed:
        mode = {"placement": Placement(layers, 2)}
    with LlamaBackend(
        source.model,
        max_context=128,
        max_nodes=32,
        n_threads=1,
        cache_type_k="f32",
        cache_type_v="f32",
        flash_attention=False,
        hidden_state_layers=own.target_layers,
        **mode,
    ) as backend:
        own.share_weights(backend)
        with load(own) as drafting:
            yield backend, drafting
