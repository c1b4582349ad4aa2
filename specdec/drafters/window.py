"""DraftWindow: the first and the most recent tokens of a long context, for the draft model.

Attention concentrates on the first tokens of a sequence, whatever they are. A model with these
*sinks* and a window of recent tokens, at the positions that they then have, predicts as well as
with the whole context (StreamingLLM, Xiao et al. 2024, section 3). A draft's window affects its
guesses only: the target verifies with the whole context.

    context   t0 t1 t2 t3 t4 .................... t95 t96 t97 ... t140
    view      t0 t1 t2 t3                             t96 t97 ... t140        N = 64

Cached keys would have to be rotated again each time the window moves. So it does not slide but
jumps: it grows to N tokens and then begins N/2 later, and the draft recomputes those. That costs
one more token per token of the sequence, N/2 of them in one run, on any backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

N_SINKS = 4


@dataclass(frozen=True)
class DraftWindow:
    """Maps a context to the tokens that the draft's cache contains.

    A function of the context alone, so that cached KV of another view is reused for their common
    prefix.
    """

    n_recent: int | None = None
    """Maximum tokens after the sinks; None means the whole context."""

    @classmethod
    def fitting(
        cls, requested: int | None, draft_context: int, target_context: int, n_nodes: int
    ) -> DraftWindow:
        """Return the window of a draft whose cache has a capacity of `draft_context` tokens.

        Args:
            requested: recent tokens that the user requested, if any.
            target_context: maximum tokens of a sequence.
            n_nodes: tree nodes that should fit beside the window.
        """
        limit = target_context
        if draft_context < target_context:
            limit = max(1, draft_context - N_SINKS - min(n_nodes, draft_context // 4))
        n_recent = min(requested or limit, limit)
        return cls(None if n_recent + N_SINKS >= target_context else n_recent)

    def view(self, context_ids: Sequence[int]) -> list[int]:
        """Return the tokens to draft from; the last one is the context's."""
        n_tokens, n_recent = len(context_ids), self.n_recent
        if n_recent is None or n_tokens <= N_SINKS + n_recent:
            return list(context_ids)
        step = max(1, n_recent // 2)
        start = -(-(n_tokens - n_recent) // step) * step
        return [*context_ids[:N_SINKS], *context_ids[start:]]


def draft_context_size(
    requested: int | None, ctx_size: int, draft_max_context: int, n_nodes: int
) -> int:
    """Return the capacity, in tokens, of the draft's KV cache; arguments as for `fitting`."""
    whole = min(ctx_size, draft_max_context)
    return whole if requested is None else min(whole, N_SINKS + requested + n_nodes)
