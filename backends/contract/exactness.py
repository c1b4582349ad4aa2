"""Exactness: whether a token's logits depend on the tokens before it alone (batch invariance).

They must not depend on the other tokens of its pass, on the tree, on how the prefix came into the
cache, or on where the weights were. Floating-point sums depend on their order, so in an exact
backend every sum of a token has one order. docs/sampling.md says which sums these are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exactness:
    """Result of checking a backend on this machine, before its weights are loaded."""

    is_exact: bool
    reason: str = ""
    """Why it is not exact, as the end of a line; empty if it is."""
    min_batch_tokens: int = 1
    """Tokens (and rows of logits) that a pass is padded to: from so many on, products are
    batch-invariant, giving a row the same bits however many rows there are."""
    is_thread_invariant: bool = False
    """Whether this holds for any number of threads, so that it may change between passes."""

    def can_change_threads(self) -> bool:
        """Return whether passes may use fewer threads while other programs compute: either their
        bits do not depend on that, or they need not be exact."""
        return self.is_thread_invariant or not self.is_exact


EXACT_OFF = Exactness(False, "--exact off")
