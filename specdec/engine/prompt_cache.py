"""The prompt cache folder of a session: KV of the target's and the draft's prefixes on storage.

KV is valid only for the model that computed it, on the same kind of device, so files are keyed by a
fingerprint of both (see `PrefixFiles`). The two models' files are independent of each other: the
output is the same with the KV of one, of both, or of none.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from backends.contract.prefix_cache import PrefixCache
from backends.contract.prefix_files import PrefixFiles
from offload.errors import SpecdecError
from specdec.models.opened import OpenedModel
from specdec.planning.run_plan import RunPlan

logger = logging.getLogger(__name__)


class PromptCacheError(SpecdecError):
    """The prompt cache folder cannot be used."""


def fingerprint(model: OpenedModel, device: str) -> str:
    """Return the SHA-256, in hex, of the model, its vocabulary and the device."""
    digest = hashlib.sha256(f"{model.source.fingerprint()} {device}".encode())
    digest.update("\0".join(token or "" for token in model.vocabulary.tokens).encode())
    return digest.hexdigest()


class PromptCacheFolder:
    """The folder, which is made if it is not there, and the models whose KV it may contain.

    Args:
        max_bytes: maximum bytes of all files in it, those of other models included.

    Raises:
        PromptCacheError: it is no folder, or cannot be made or written to.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder).expanduser(), max_bytes
        self._models: tuple[OpenedModel, OpenedModel | None] | None = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it contains texts
        except FileExistsError as error:
            raise PromptCacheError(
                f"the prompt cache {self._folder} is not a folder: name another one"
            ) from error
        except OSError as error:
            raise PromptCacheError(
                f"the prompt cache folder {self._folder} cannot be made: {error.strerror}: name "
                "another one"
            ) from error
        try:
            with tempfile.TemporaryFile(dir=self._folder):
                pass
        except OSError as error:
            raise PromptCacheError(
                f"the prompt cache folder {self._folder} cannot be written to: {error.strerror}: "
                "name another one"
            ) from error

    def set_models(self, target: OpenedModel, draft: OpenedModel | None) -> None:
        """Set the models, once they are opened."""
        self._models = target, draft

    def attach(
        self,
        target: PrefixCache,
        draft: PrefixCache | None,
        plan: RunPlan,
        free_memory: Callable[[int], bool],
    ) -> None:
        """Let prefix caches read and write the folder.

        free_memory: return whether so many bytes of memory, to map a tensor in, can be had.
        """
        assert self._models is not None, "the models are loaded"
        for cache, model, device in zip(
            (target, draft), self._models, (plan.device, plan.draft_device), strict=True
        ):
            if cache is not None and model is not None and cache.backend.can_save_prefix:
                cache.files = PrefixFiles(
                    self._folder,
                    fingerprint(model, device),
                    cache.backend.vocab_size,
                    cache.backend.max_context,
                    self._max_bytes,
                    free_memory,
                )
        if not target.backend.can_save_prefix:
            logger.warning(
                f"the prompt cache {self._folder} is not used for the target: llama.cpp saves only "
                "the last window of its KV"
            )
        draft_cost = plan.draft_cost_model
        if draft is not None and draft_cost is not None:
            draft.seconds = draft_cost.extra_seconds
