"""The line for users about sequences that wait for KV, with what would let them in."""

from __future__ import annotations

import logging

from offload.units import format_bytes
from specdec.policy.kv_price import KvPrice

logger = logging.getLogger(__name__)


class WaitingNotes:
    """Notes on sequences that wait, each written once per loaded model.

    Args:
        kv_tokens: capacity of the KV cache in tokens.
        price: bytes of KV, as they count in the memory budget.
    """

    def __init__(self, kv_tokens: int, price: KvPrice) -> None:
        self._kv_tokens, self._price = kv_tokens, price
        self._noted: set[str] = set()

    def note_capacity(self, num_tokens: int, num_all_tokens: int, num_running: int) -> None:
        """Note that the KV cache has no capacity for a sequence beside those that run.

        num_tokens: tokens of the sequence.
        num_all_tokens: tokens of all of them together, with what they grow by next.
        """
        # Blocks that are not full take more than their tokens, so these may be fewer than it has.
        enough = max(-(-num_all_tokens // 256), self._kv_tokens // 256 + 1) * 256
        more = (enough - self._kv_tokens) * self._price.token_bytes
        cost = f", {format_bytes(more)} of the memory that holds layers" if more > 0 else ""
        self._note(
            "capacity",
            f"sequences wait: the KV cache of {self._kv_tokens} tokens has no capacity for one of "
            f"{num_tokens} beside {num_running} that run; --kv-tokens {enough} lets it in{cost}",
        )

    def note_price(self, num_tokens: int, num_running: int) -> None:
        """Note that a sequence would slow those that run down by more than it brings."""
        n_bytes = format_bytes(num_tokens * self._price.token_bytes)
        self._note(
            "price",
            f"sequences wait: KV for {num_tokens} tokens takes {n_bytes} of layers, which would "
            f"add {self._price.pass_seconds(num_tokens):.2g} s to every pass, more than one more "
            f"beside {num_running} is worth; {n_bytes} more of --memory-budget let it in",
        )

    def _note(self, kind: str, text: str) -> None:
        if kind not in self._noted:
            self._noted.add(kind)
            logger.warning("%s", text)
