"""OpportunisticLayers: pin layers of the target in memory that is reserved but not in use.

A plan reserves memory for the longest context, the widest pass and allocations of libraries. A
sequence of a few hundred tokens uses a part of that. So the process's memory is measured in every
step, and streamed layers are pinned in the remaining memory, until something else needs it.
"""

from __future__ import annotations

from backends.contract.backend import Backend
from backends.contract.prefix_cache import PrefixCache
from offload.process.memory import companion_bytes, process_memory, recent_peak_rss
from offload.units import MIB

RESERVE_BYTES = 40 * MIB
"""Memory never used for layers: use may grow between two measurements, and the kernel's limit
counts its own tables. With it, no allocation of a hundred prompts failed (docs/benchmarks.md)."""
MIN_RELEASED_BYTES = 32 * MIB
"""Minimum unused KV memory that is given back: to take it again costs a fault for each page."""
_CHUNK_TOKENS = 256
"""Minimum prompt tokens of a pass that a plan's activations are made for."""


def activation_bytes_per_token(activation_bytes: int, max_num_tokens: int) -> float:
    """Return activation bytes per token; max_num_tokens: maximum tokens of a decode step."""
    return activation_bytes / max(max_num_tokens, _CHUNK_TOKENS)


class OpportunisticLayers:
    """Number of bytes of layers that the target may pin; 0 if it does not stream.

    Args:
        target: the model whose layers are pinned.
        draft: if it was not used so far, its next pass computes all sequences.
        budget_bytes: memory budget of the process.
        activation_bytes: planned for the target's widest pass.
        max_num_tokens: maximum tokens of a decode step.
        draft_activation_bytes: planned for the draft's widest pass.
        draft_level_tokens: maximum nodes of a level of a draft tree.
        drafting_bytes: planned for other memory of drafting; never used for layers.
        is_streamed: whether the target has layers to pin; if not, nothing is measured.
        draft_prefix_cache: the draft's KV.
    """

    def __init__(
        self,
        target: Backend,
        draft: Backend | None,
        budget_bytes: int,
        *,
        activation_bytes: int,
        max_num_tokens: int,
        draft_activation_bytes: int = 0,
        draft_level_tokens: int = 1,
        drafting_bytes: int = 0,
        is_streamed: bool = True,
        draft_prefix_cache: PrefixCache | None = None,
    ) -> None:
        self._target, self._is_streamed = target, is_streamed
        self._draft, self._draft_prefix_cache = draft, draft_prefix_cache
        self._whole_bytes, self._budget_bytes = budget_bytes, budget_bytes - drafting_bytes
        self._max_num_tokens, self._activation_bytes = max_num_tokens, activation_bytes
        self._draft_bytes = draft_activation_bytes
        self._draft_level_tokens = draft_level_tokens
        self._bytes_per_token = activation_bytes_per_token(activation_bytes, max_num_tokens)

    def set_budget(self, budget_bytes: int) -> None:
        """Use another budget from now on: of a smaller one, release what exceeds it at once."""
        growth_bytes = budget_bytes - self._whole_bytes
        self._whole_bytes, self._budget_bytes = budget_bytes, self._budget_bytes + growth_bytes
        if growth_bytes < 0 and self._target.pinned_bytes:
            self._target.set_pinned_bytes(max(0, self._target.pinned_bytes + growth_bytes))
            recent_peak_rss()  # of the larger budget: the next step measures its own

    def release_for_prefill(self, num_cached_tokens: int, num_seqs: int = 1) -> None:
        """Release layers before a pass with prefill chunks, which may take the planned maximum.

        num_cached_tokens, num_seqs: totals after the pass, to which the KV caches may grow.
        """
        pinned = self._target.pinned_bytes
        if not pinned:
            return
        unused_bytes = self._unused_bytes(
            self._activation_bytes + self._draft_bytes, num_cached_tokens, num_seqs
        )
        if unused_bytes < 0:
            self._target.set_pinned_bytes(max(0, pinned + unused_bytes))

    def release_kv(self) -> None:
        """Give KV memory that finished sequences left back to the system, for layers."""
        if self._is_streamed:
            for model in (self._target, self._draft):
                if model is not None and model.unused_kv_bytes >= MIN_RELEASED_BYTES:
                    model.release_unused_kv()

    def free_memory(self, n_bytes: int) -> bool:
        """Release layers before a file of `n_bytes` is mapped between passes; return whether it
        fits in the budget."""
        pinned = self._target.pinned_bytes
        if pinned:
            self._target.set_pinned_bytes(max(0, pinned - n_bytes))
        own_bytes = process_memory().rss_bytes + companion_bytes()
        return own_bytes + n_bytes <= self._whole_bytes

    def pin_after_prefill(
        self, num_cached_tokens: int, num_seqs: int = 1, *, has_more_prefill: bool = False
    ) -> None:
        """Pin layers after a pass with prefill chunks.

        Its memory says little about decode steps, which may take less. So layers are pinned only
        beside the widest planned pass and never released here; none if more prompts follow.
        num_cached_tokens, num_seqs: totals after the pass.
        """
        if not self._is_streamed:
            return
        unused_bytes = self._unused_bytes(
            self._activation_bytes + self._draft_bytes, num_cached_tokens, num_seqs
        )
        if unused_bytes > 0 and not has_more_prefill:
            self._target.set_pinned_bytes(self._target.pinned_bytes + unused_bytes)

    def pin_after_decode(
        self,
        num_step_tokens: int,
        num_cached_tokens: int,
        num_seqs: int = 1,
        num_uncomputed: int = 0,
    ) -> None:
        """Pin or release layers after a decode step of `num_step_tokens` tokens.

        The next step may have more tokens, and the KV caches may grow. Layers are pinned as soon as
        there is memory, and released once half of the reserve is used.

        num_cached_tokens, num_seqs: totals of the sequences.
        num_uncomputed: tokens that the draft has to compute in its next pass, if more than a tree
            level.
        """
        if not self._is_streamed:
            return
        reserved_bytes = int(max(0, self._max_num_tokens - num_step_tokens) * self._bytes_per_token)
        draft_tokens = max(num_uncomputed, self._draft_level_tokens)
        token_bytes = activation_bytes_per_token(self._draft_bytes, self._draft_level_tokens)
        reserved_bytes += min(self._draft_bytes, int(draft_tokens * token_bytes))
        unused_bytes = self._unused_bytes(reserved_bytes, num_cached_tokens, num_seqs)
        pinned = self._target.pinned_bytes
        if unused_bytes > 0 or (pinned and unused_bytes < -RESERVE_BYTES // 2):
            self._target.set_pinned_bytes(max(0, pinned + unused_bytes))

    def _unused_bytes(self, reserved_bytes: int, num_cached_tokens: int, num_seqs: int) -> int:
        """Return the bytes unused beside the recent peak and `reserved_bytes`; may be negative."""
        reserved_bytes += self._target.unread_bytes + self._target.kv_growth_bytes(
            num_cached_tokens
        )
        if self._draft is not None:
            n_begun = 0 if self._draft_prefix_cache is None else self._draft_prefix_cache.n_in_use
            n_new = max(0, num_seqs - n_begun)  # each begins a KV block of its own
            reserved_bytes += self._draft.unread_bytes + self._draft.kv_growth_bytes(
                num_cached_tokens, n_new
            )
        return self._budget_bytes - recent_peak_rss() - reserved_bytes - RESERVE_BYTES
