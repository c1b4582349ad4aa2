"""ContextWindow: the first and the most recent tokens of a context that grows beyond its cache.

Attention concentrates on the first tokens of a sequence, whatever they are. A model with these
*sinks* and a window of recent tokens, at the positions that they then have, predicts as well as
with the whole context (StreamingLLM, Xiao et al. 2024, section 3).

    context   t0 t1 t2 t3 t4 .................... t95 t96 t97 ... t140
    view      t0 t1 t2 t3                             t96 t97 ... t140        N = 64

Cached keys would have to be rotated again each time the window moves. So it does not slide but
jumps: it grows to N tokens and then begins N/2 later, and the model recomputes those. That costs
one more token per token of the sequence, N/2 of them in one run, on any backend and with recurrent
layers.

A draft's window affects its guesses only: the target verifies with the whole context. A window of
the target (--context-shift) changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

N_SINKS = 4


@dataclass(frozen=True)
class ContextWindow:
    """Maps a context to the tokens that a model's cache contains.

    A function of the context alone, so that cached KV of another view is reused for their common
    prefix, and so that the target's view does not depend on its passes.
    """

    n_recent: int | None = None
    """Maximum tokens after the sinks; None means the whole context."""

    @classmethod
    def of_target(cls, max_context: int) -> ContextWindow:
        """Return the window of a target whose cache has a capacity of `max_context` tokens.

        max_context: at least `MIN_SHIFTED_CONTEXT`.
        """
        return cls(max_context - 1 - N_SINKS)  # the next token needs a place

    @classmethod
    def fitting(
        cls, requested: int | None, draft_context: int, target_context: int | None, n_nodes: int
    ) -> ContextWindow:
        """Return the window of a draft whose cache has a capacity of `draft_context` tokens.

        Args:
            requested: recent tokens that the user requested, if any.
            target_context: maximum tokens of a sequence; None: any number.
            n_nodes: tree nodes that should fit beside the window.
        """
        limit = draft_context if target_context is None else target_context
        if target_context is None or draft_context < target_context:
            limit = max(1, draft_context - N_SINKS - min(n_nodes, draft_context // 4))
        n_recent = min(requested or limit, limit)
        is_whole = target_context is not None and n_recent + N_SINKS >= target_context
        return cls(None if is_whole else n_recent)

    def n_hidden(self, n_tokens: int) -> int:
        """Return how many tokens after the sinks the view of a context of `n_tokens` leaves out."""
        n_recent = self.n_recent
        if n_recent is None or n_tokens <= N_SINKS + n_recent:
            return 0
        step = max(1, n_recent // 2)
        return -(-(n_tokens - n_recent) // step) * step - N_SINKS

    def n_before_jump(self, n_tokens: int) -> int | None:
        """Return how many tokens the context grows by until its view leaves out more; None: the
        view is the whole context."""
        if self.n_recent is None:
            return None
        return N_SINKS + self.n_recent + self.n_hidden(n_tokens) + 1 - n_tokens

    def view(self, context_ids: Sequence[int]) -> list[int]:
        """Return the tokens in the cache; the last one is the context's."""
        n_hidden = self.n_hidden(len(context_ids))
        if not n_hidden:
            return list(context_ids)
        return [*context_ids[:N_SINKS], *context_ids[N_SINKS + n_hidden :]]


MIN_SHIFTED_CONTEXT = 4 * N_SINKS
"""Minimum capacity, in tokens, for a window of the target."""


def draft_context_size(
    requested: int | None, ctx_size: int, draft_max_context: int, n_nodes: int
) -> int:
    """Return the capacity, in tokens, of the draft's KV cache; arguments as for `fitting`."""
    whole = min(ctx_size, draft_max_context)
    return whole if requested is None else min(whole, N_SINKS + requested + n_nodes)
