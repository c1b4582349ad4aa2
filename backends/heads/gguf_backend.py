"""GgufHead: the MTP head of a GGUF model, which llama.cpp has loaded with its target.

llama.cpp runs the head in a context of its own over the target's weights. Its layer has ordinary
attention, whatever the target's layers are.
"""

from __future__ import annotations

from backends.contract.backend import BackendError
from backends.contract.recovery import RecoveringBackend
from backends.contract.store import PassOutput
from backends.llama.backend import LlamaBackend
from backends.llama.base import GgufBackend
from backends.llama.batch import Batch
from backends.llama.context import ContextOptions
from backends.llama.memory import logged_sizes


class GgufHead(LlamaBackend):
    """The head of a loaded target, which it must not outlive. It has no streamed layers.

    Its passes read rows of the target's embedding, so none may run during one of the target's.

    Args:
        options: is_head is set.
        only_with_logits: whether it returns hidden states of tokens with logits alone.

    Raises LlamaError where llama.cpp cannot run the head or returns no hidden states.
    """

    takes_hidden_states = True

    def __init__(
        self, target: GgufBackend, options: ContextOptions, *, only_with_logits: bool
    ) -> None:
        RecoveringBackend.__init__(self)
        self._target = target
        self._closing = []
        self._stream, self._outputs = None, None
        self._model = target.loaded
        self.vocab_size = target.vocab_size
        try:
            self._open_context(options)
            n_bytes = logged_sizes(self._context.log).get("cache", 0)
            self._kv_bytes_per_token = n_bytes // self._context.n_cells
            self._open_passes()
            self._context.collect_hidden_states(only_with_logits=only_with_logits)
        except BaseException:
            self.close()
            raise

    @property
    def can_save_prefix(self) -> bool:
        return False  # a head begins anywhere in its context

    def _run(self, batch: Batch) -> PassOutput:
        if not batch.has_hidden_states:
            raise BackendError("a draft head computes tokens from the target's hidden states")
        self._target.read_embeddings(batch.token_ids)
        return super()._run(batch)
