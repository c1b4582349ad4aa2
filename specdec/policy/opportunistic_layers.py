"""Memory that a plan sets aside and nobody uses holds layers of the target meanwhile.

A plan promises the longest context, the widest pass and what libraries may allocate. A text of a
few hundred tokens takes a part of that. So what the process really takes is measured round by
round, and layers that would stream stay in what is left, until something else asks for it.
"""

from __future__ import annotations

from backends.contract.backend import Backend
from backends.contract.prefix_cache import PrefixCache
from offload.process.memory import process_memory, recent_peak_rss
from offload.units import MIB

RESERVE_BYTES = 40 * MIB
"""Never lent: memory may grow between two measurements, and the kernel's limit counts tables of its
own. With so much left no allocation of a hundred prompts met it (docs/benchmarks.md)."""
_CHUNK_TOKENS = 256
"""A plan's activations are at least those of so many rows of a prompt."""


def bytes_per_row(activation_bytes: int, max_num_tokens: int) -> float:
    """Of the activations planned for the widest pass; most_rows: of a pass that decodes."""
    return activation_bytes / max(max_num_tokens, _CHUNK_TOKENS)


class OpportunisticLayers:
    """Decides how much the target may hold; nothing where it does not stream.

    Args:
        target: whose layers are held.
        draft: may have rested so far, and have to compute the whole text in the next step;
            draft_texts: those that it has KV of.
        budget_bytes: of the process.
        activation_bytes: planned for the target's widest pass.
        most_rows: of a pass that decodes.
        draft_activation_bytes: planned for the draft's widest pass.
        draft_level_rows: most nodes of a level of a draft tree.
        drafting_bytes: planned for what else drafting computes; never lent.
        is_streamed: whether the target has layers to hold; it is not measured for nothing.
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
        self._row_bytes = bytes_per_row(activation_bytes, max_num_tokens)

    def give_back(self) -> None:
        """Before anything that may take all that was planned."""
        self._target.pin_layers(0)

    def make_capacity(self, n_tokens: int, num_seqs: int = 1) -> None:
        """Before a pass in which prompts enter, after which so many sequences have so many tokens: it
        may take what was planned for the widest pass, and the KV caches may grow. Nothing is lent
        here."""
        pinned = self._target.pinned_bytes
        if not pinned:
            return
        left = self._left(self._activation_bytes + self._draft_bytes, n_tokens, num_seqs)
        if left < 0:
            self._target.pin_layers(max(0, pinned + left))

    def free_memory(self, n_bytes: int) -> bool:
        """Before so many bytes of a file are mapped for a moment, while nothing computes; whether
        they fit."""
        pinned = self._target.pinned_bytes
        if pinned:
            self._target.pin_layers(max(0, pinned - n_bytes))
        return process_memory().rss_bytes + n_bytes <= self._whole_bytes

    def begin(self, n_tokens: int, num_seqs: int = 1, *, more_enter: bool = False) -> None:
        """Prompts have entered; behind them so many sequences have so many tokens.

        Their pass tells too little of steps of decoding, which have other parts, and may have
        taken more than they will. So nothing is asked back, and lent is what is left beside the
        widest pass that was planned; nothing, where more prompts enter next.
        """
        if not self._is_streamed:
            return
        left = self._left(self._activation_bytes + self._draft_bytes, n_tokens, num_seqs)
        if left > 0 and not more_enter:
            self._target.pin_layers(self._target.pinned_bytes + left)

    def pin(self, num_tokens: int, n_tokens: int, num_seqs: int = 1, n_lacking: int = 0) -> None:
        """A step of decoding is over, whose pass had so many rows; the sequences have so many tokens.

        The next one may have more of them, and the KV caches may have to grow. More is lent as soon
        as there is more; it is asked back once half of the reserve is gone.

        n_lacking: tokens of all sequences that the draft has still to compute, which may be its next
        pass; else that is a level of a tree.
        """
        if not self._is_streamed:
            return
        to_come = int(max(0, self._max_num_tokens - num_tokens) * self._row_bytes)
        draft_rows = max(n_lacking, self._draft_level_tokens)
        row_bytes = bytes_per_row(self._draft_bytes, self._draft_level_tokens)
        to_come += min(self._draft_bytes, int(draft_rows * row_bytes))
        left = self._left(to_come, n_tokens, num_seqs)
        pinned = self._target.pinned_bytes
        if left > 0 or (pinned and left < -RESERVE_BYTES // 2):
            self._target.pin_layers(max(0, pinned + left))

    def _left(self, to_come: int, n_tokens: int, num_seqs: int) -> int:
        """Bytes that nobody takes, where so many are to come beside what was taken of late."""
        to_come += self._target.unread_bytes + self._target.kv_growth_bytes(n_tokens)
        if self._draft is not None:
            n_begun = 0 if self._draft_prefix_cache is None else self._draft_prefix_cache.n_in_use
            n_new = max(0, num_seqs - n_begun)  # each of which begins a block of its own
            to_come += self._draft.unread_bytes + self._draft.kv_growth_bytes(n_tokens, n_new)
        return self._budget_bytes - recent_peak_rss() - to_come - RESERVE_BYTES
