"""Every kind of backend: which library computes, and where the weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import in_dtype, save_tiny_checkpoint
from cpu_engine import CpuEngine
from gguf_models import save_tiny_gguf
from tiered import STORAGE, tiered_model

from backends.contract.exactness import EXACT_OFF
from backends.contract.recovery import RecoveringBackend
from backends.contract.source import BackendOptions, ModelSource
from backends.kv.tier_sizes import Tiers
from offload.placement.placement import Placement
from offload.placement.plan import pin_all

N_SLOTS = 2
ON_STORAGE = "kv-on-storage"
"""In the name of a kind: its KV cache has few blocks in memory, and the others in a file."""
BF16 = "-bf16"
"""End of the name of a family whose checkpoint is stored in bf16."""
TYPES = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": False}
"""Cache and attention of an inexact llama.cpp whose rounding depends little on a pass's rows."""


@dataclass(frozen=True)
class Kind:
    """One kind of backend; its models are written below `folder`, once."""

    name: str
    folder: Path
    cache_type: str | None = None
    """Number format of keys and values in the KV cache; the backend's choice when None."""

    @property
    def is_gguf(self) -> bool:
        return self.name.startswith("llama")

    @property
    def is_streamed(self) -> bool:
        return "resident" not in self.name

    @property
    def resident(self) -> Kind:
        """The kind that computes alike, with all weights in memory."""
        return replace(self, name="llama-resident" if self.is_gguf else "torch-resident")

    @property
    def max_chunk(self) -> int:
        """Tokens of a prompt that are computed at once."""
        return 512 if self.is_gguf else 256

    def model(self, family: str = "llama", n_layers: int = 3, n_ctx: int = 1024) -> Path:
        """Return the checkpoint, or the GGUF file."""
        path = self.folder / f"{family}-{n_layers}-{n_ctx}{'.gguf' * self.is_gguf}"
        if path.exists():
            return path
        if family.endswith(BF16):
            whole = self.model(family.removesuffix(BF16), n_layers, n_ctx)
            return in_dtype(whole, path, torch.bfloat16)
        if self.is_gguf:
            return save_tiny_gguf(family, path, n_layers=n_layers, n_ctx=n_ctx)
        layers, length = ("n_layer", {}) if family == "bloom" else ("num_hidden_layers", n_ctx)
        sizes = {layers: n_layers, **({"max_position_embeddings": length} if length else {})}
        return save_tiny_checkpoint(family, path, 0, **sizes)

    def source(self, family: str = "llama", *, is_exact: bool = True, **sizes: int) -> ModelSource:
        types = (self.cache_type, self.cache_type)
        options = BackendOptions(1, *types, is_exact=is_exact)
        if self.is_gguf:
            from backends.llama.source import GgufSource

            source: ModelSource = GgufSource(self.model(family, **sizes), options)
        else:
            from backends.hf.source import HfSource

            source = HfSource(self.model(family, **sizes), options)
        assert source.exactness.is_exact == is_exact, source.exactness
        return source

    def load(
        self,
        family: str = "llama",
        *,
        is_exact: bool = True,
        n_layers: int = 3,
        max_num_seqs: int = 5,
        **options: Any,
    ) -> RecoveringBackend[Any]:
        """Load a model; `options` are those that the backends have in common."""
        source = self.source(family, is_exact=is_exact, n_layers=n_layers)
        options = {"max_context": 60, "max_nodes": 80, "num_kv_slots": 380, **options}
        if self.is_gguf:
            return self._llama(source, is_exact, max_num_seqs=max_num_seqs, **options)
        return self._torch(source, **options)

    def _llama(self, source: Any, is_exact: bool, **options: Any) -> RecoveringBackend[Any]:
        from backends.llama.backend import LlamaBackend

        run = source._run
        types = {"cache_type_k": run.type_k, "cache_type_v": run.type_v} if is_exact else TYPES
        exactness = run.exactness if is_exact else EXACT_OFF
        if self.is_streamed:
            options["placement"] = Placement(source.layers, N_SLOTS)
        else:
            options["load_mode"] = "mmap"
        return LlamaBackend(source.model, n_threads=1, exactness=exactness, **types, **options)

    def _torch(self, source: Any, **options: Any) -> RecoveringBackend[Any]:
        from backends.cuda.weights import DeviceWeights
        from backends.hf.backend import TorchBackend
        from backends.hf.cpu_weights import CpuWeights

        model = source.model
        weights: Any
        if ON_STORAGE in self.name:
            options["tiers"] = Tiers(
                options.pop("n_hot", 3), options.pop("n_kept_free", 1), self.folder
            )
        if self.name == "device":
            plan = tiered_model(model, lambda layer, tensor: STORAGE, N_SLOTS)
            weights = DeviceWeights(model, plan, CpuEngine())
        elif self.is_streamed:
            weights = CpuWeights(model, model.layer_weights, N_SLOTS)
        else:
            weights = CpuWeights(model, pin_all(model.layer_weights), 0)
        return TorchBackend(model, weights, exactness=source.exactness, **options)


def make_kind(name: str, folder: Path) -> Kind:
    """name: a kind's, or with the cache type behind it: "torch-resident q8_0"."""
    name, _, cache_type = name.partition(" ")
    if name.startswith("llama"):
        pytest.importorskip("llama_cpp")
        pytest.importorskip("gguf")
    return Kind(name, folder, cache_type or None)


STREAMED = [
    "torch-streamed",
    "device",
    "device q8_0",
    pytest.param("llama-streamed", marks=pytest.mark.gguf),
]
NAMES = [
    "torch-resident",
    f"torch-streamed-{ON_STORAGE}",
    "torch-resident q8_0",
    "torch-resident fp8",
    *STREAMED,
    pytest.param("llama-resident", marks=pytest.mark.gguf),
]


@contextmanager
def inside_a_pass(
    backend: RecoveringBackend[Any], action: Callable[[], None], n_before: int = 0
) -> Iterator[list[int]]:
    """Call `action` in the middle of a pass, after `n_before` chunks; yield the chunks' lengths."""
    seen: list[int] = []

    def act(num_tokens: int) -> None:
        seen.append(num_tokens)
        if len(seen) > n_before:
            action()

    with pytest.MonkeyPatch.context() as patch:
        if hasattr(backend, "_runner"):
            forward = backend._runner.layers[1]._forward

            def run(hidden: Any, *args: Any, **rest: Any) -> Any:
                act(hidden.shape[1])
                return forward(hidden, *args, **rest)

            patch.setattr(backend._runner.layers[1], "_forward", run)
        else:
            decode = backend._context.decode

            def run_batch(batch: Any) -> int:
                stream = backend._stream
                if stream is None or stream._recording is None:  # no inspection of the graph
                    act(batch.n_tokens)
                return int(decode(batch))

            patch.setattr(backend._context, "decode", run_batch)
        yield seen


def save(sequence: Any) -> dict[str, Any]:
    """Return the saved KV of a committed prefix."""
    tensors = sequence.prefix_tensors()
    buffers = {t.name: memoryview(bytearray(t.n_bytes)) for t in tensors}
    sequence.save_prefix(buffers)
    return {t.name: (t, buffers[t.name]) for t in tensors}


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Compare rows of float32 attention: chunks of other lengths round differently (at most 4e-5
    of the largest logit seen), reading a wrong cell changes a row by 0.01 or more."""
    return bool(np.abs(actual - expected).max() <= 2e-4 * max(1.0, float(np.abs(expected).max())))
