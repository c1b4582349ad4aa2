"""What a draft model is shown of a long context: its first tokens and the most recent ones.

Attention piles up on the first tokens of a text, whatever they say; a model that keeps these
*sinks* and a window of recent tokens, at the positions that they then have, goes on as well as with
all of it (StreamingLLM, Xiao et al. 2024, section 3). For a draft only its guesses are at stake:
the target verifies with the whole context.

    context   t0 t1 t2 t3 t4 .................... t95 t96 t97 ... t140
    view      t0 t1 t2 t3                             t96 t97 ... t140        N = 64

The cached keys would have to be rotated anew each time the window moves. So it does not slide but
jumps: it grows to N tokens and then begins N/2 later, and the draft computes those anew. That is
one more row for each token of the text, N/2 of them in one run, on any backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

N_SINKS = 4


@dataclass(frozen=True)
class DraftWindow:
    """Maps a context to the tokens that the draft's cache holds.

    A function of the context alone: what the cache still holds of another view is of use wherever
    the two begin alike.
    """

    n_recent: int | None = None
    """Most tokens after the sinks; None shows the whole context."""

    @classmethod
    def fitting(
        cls, requested: int | None, draft_context: int, target_context: int, n_nodes: int
    ) -> DraftWindow:
        """The window of a draft whose cache has room for `draft_context` tokens.

        Args:
            wanted: recent tokens that the user asked for, if at all.
            target_context: most tokens of a text.
            n_nodes: tree nodes that should have room beside the window.
        """
        limit = target_context
        if draft_context < target_context:
            limit = max(1, draft_context - N_SINKS - min(n_nodes, draft_context // 4))
        n_recent = min(requested or limit, limit)
        return cls(None if n_recent + N_SINKS >= target_context else n_recent)

    def view(self, context_ids: Sequence[int]) -> list[int]:
        """The tokens to draft from; the last one is the context's."""
        n_tokens, n_recent = len(context_ids), self.n_recent
        if n_recent is None or n_tokens <= N_SINKS + n_recent:
            return list(context_ids)
        step = max(1, n_recent // 2)
        start = -(-(n_tokens - n_recent) // step) * step
        return [*context_ids[:N_SINKS], *context_ids[start:]]


def draft_context_size(
    requested: int | None, ctx_size: int, draft_max_context: int, n_nodes: int
) -> int:
    """Tokens that the draft's KV cache is to have room for; the arguments as for `fitting`."""
    whole = min(ctx_size, draft_max_context)
    return whole if requested is None else min(whole, N_SINKS + requested + n_nodes)
