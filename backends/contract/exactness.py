"""Whether a backend is exact: a token's logits are a function of the tokens before it, alone.

Of nothing else means: not of the rows that share its pass, of the tree, of how the prefix came into
the cache, or of where the weights were. Floating-point sums depend on their order, so a backend is
exact where every sum of a row has one order. docs/sampling.md says which sums these are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exactness:
    """What a backend found out about itself, on this machine, before its weights are loaded."""

    is_exact: bool
    reason: str = ""
    """Why it is not, as the end of a line; empty where it is."""
    min_batch_tokens: int = 1
    """Rows (and rows of logits) that a pass is filled up to: from so many on, the products give a
    row the same bits however many rows there are."""
    is_thread_invariant: bool = False
    """Whether this goes for any number of threads, so that it may change from pass to pass."""

    def may_follow_load(self) -> bool:
        """Whether passes may use fewer threads where other programs compute: they must, or need
        not, keep their bits."""
        return self.is_thread_invariant or not self.is_exact


NOT_ASKED = Exactness(False, "--exact off")
