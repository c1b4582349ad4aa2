"""HeadSource: the draft head of a loaded target, for the planner and for loading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from backends.contract.backend import LAST_HIDDEN_STATE, Backend, BackendError
from backends.contract.shares_weights import SharesWeights
from backends.contract.source import BackendOptions, Loading, ModelCompute
from backends.heads.eagle3 import load_eagle3_head
from backends.heads.gguf_tensors import DecodedWeights
from backends.heads.mtp import load_mtp_folder, load_mtp_head
from backends.heads.target import CheckpointTarget, HeadTarget
from backends.hf.model import HfModel
from backends.hf.source import HfSource
from backends.hf.weights import TorchWeights
from offload.formats.fingerprint import fingerprint

_FLOAT32_BYTES = 4


class HeadSource(HfSource, SharesWeights):
    """A draft head. Modules that it shares with the target take no further memory.

    `load` needs the backend of the target: see `share_weights`.

    Args:
        head: the head on the meta device.
        target_layers: layers of the target whose outputs it takes: see
            Backend.collect_hidden_states.
        own_layers: layers of its own whose outputs it goes on from.
    """

    can_use_gpu = False

    def __init__(
        self,
        path: Path,
        options: BackendOptions,
        head: HfModel,
        target: HeadTarget,
        *,
        target_layers: Sequence[int] = (LAST_HIDDEN_STATE,),
        own_layers: Sequence[int] = (LAST_HIDDEN_STATE,),
    ) -> None:
        super().__init__(path, options, lambda _: head)
        self.can_use_gpu = False  # not tried
        width = len(target_layers) * target.hidden_size
        self.hidden_state_bytes = _FLOAT32_BYTES * width
        self.warnings = ()
        self.target_layers, self._own_layers = tuple(target_layers), own_layers
        self._target = target
        self._owner: Backend | None = None

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner
        self._target.bind(owner)

    def _load(self, loading: Loading) -> Backend:
        if self._owner is None:
            raise BackendError("a draft head is loaded after its target")
        backend = super()._load(loading)
        self._owner.collect_hidden_states(self.target_layers)
        backend.collect_hidden_states(self._own_layers)
        backend.takes_hidden_states = True
        return backend


class MtpSource(HeadSource):
    """The MTP head of a target's checkpoint, or one in a folder of its own."""

    def __init__(
        self, target: HfSource, options: BackendOptions, folder: Path | None = None
    ) -> None:
        path = target.path if folder is None else folder
        load = load_mtp_head if folder is None else load_mtp_folder
        super().__init__(path, options, load(target.model, path), CheckpointTarget(target.model))


class Eagle3Source(HeadSource):
    """An EAGLE-3 head: a folder with safetensors and a config.json, or a GGUF file."""

    def __init__(self, path: Path, target: HeadTarget, options: BackendOptions) -> None:
        head = load_eagle3_head(target, path)
        layers = {"target_layers": head.target_layers, "own_layers": head.own_layers}
        super().__init__(path, options, head.model, target, **layers)
        self._files, self._has_own_output = head.files, head.has_own_output

    def fingerprint(self) -> str:
        return fingerprint(self._files.index.values(), f"{self._files.config} {self.model.dtype}")

    @property
    def head_bytes(self) -> int:
        if not self._has_own_output and self._target.output_bytes is not None:
            return self._target.output_bytes
        ids = self._files.target_ids
        n_outputs = self.vocab_size if ids is None else len(ids)
        return n_outputs * self.model.config.hidden_size * self.model.dtype.itemsize

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        compute = super().measure_compute(beside_reads)
        return compute if self._has_own_output else self._target.with_output_head(compute)

    def _weights(self, loading: Loading) -> TorchWeights:
        files = self._files
        if files.stored is None:
            return super()._weights(loading)
        layer = files.config.layer
        heads = {
            "layers.0.self_attn.q_proj.weight": layer.num_attention_heads,
            "layers.0.self_attn.k_proj.weight": layer.num_key_value_heads,
        }
        return DecodedWeights(self.model, files.stored, heads)
