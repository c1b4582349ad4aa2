"""SharesWeights: a source of models that use weights of another one."""

from __future__ import annotations

from abc import abstractmethod

from backends.contract.backend import Backend
from backends.contract.source import ModelSource


class SharesWeights(ModelSource):
    """A source whose models use weights of another one that is loaded."""

    @abstractmethod
    def share_weights(self, owner: Backend) -> None:
        """Let `load` use this backend's weights from now on."""
