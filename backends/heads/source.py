"""HeadSource: the draft head of a loaded target, for the planner and for loading."""

from __future__ import annotations

from pathlib import Path

from backends.contract.backend import LAST_HIDDEN_STATE, Backend, BackendError
from backends.contract.self_draft import SharesWeights
from backends.contract.source import BackendOptions, Loading
from backends.heads.mtp import load_mtp_head
from backends.hf.model import HfModel
from backends.hf.source import HfSource

_FLOAT32_BYTES = 4


class HeadSource(HfSource, SharesWeights):
    """The MTP head of a target's checkpoint. Embedding and output head are the target's own, and
    take no further memory.

    `load` needs the backend of the target: see `share_weights`.
    """

    can_use_gpu = False

    def __init__(self, target: HfSource, options: BackendOptions) -> None:
        def load(directory: Path) -> HfModel:
            return load_mtp_head(target.model, directory)

        super().__init__(target.path, options, load)
        self.can_use_gpu = False  # not tried
        self.hidden_state_bytes = _FLOAT32_BYTES * self.model.config.hidden_size
        self.warnings = ()
        self._target = target
        self._owner: Backend | None = None

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner

    def _load(self, loading: Loading) -> Backend:
        if self._owner is None:
            raise BackendError("a draft head is loaded after its target")
        backend = super()._load(loading)
        for passes in (self._owner, backend):  # the head goes on from its own hidden states
            passes.collect_hidden_states((LAST_HIDDEN_STATE,))
        backend.takes_hidden_states = True
        return backend
