"""KvPrice: whether a further sequence brings more than its KV and its tokens cost.

KV takes memory that otherwise holds layers of a streamed model, and these are then read in every
pass. A further sequence is assumed to bring as many tokens per pass as the mean of those that run.
With S tokens in T seconds of n sequences it pays while (S + S/n) / (T + dT) >= S / T, that is
dT <= T / n: what it adds to a pass is at most a running sequence's share of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.policy.cost_model import CostModel


@dataclass(frozen=True)
class KvPrice:
    """Price of KV, in seconds of every pass.

    token_bytes: KV of one token, of the target and its draft; 0 where no layer streams.
    read_bytes_per_second: bandwidth at which layers are read instead.
    """

    token_bytes: int = 0
    read_bytes_per_second: float = 1.0

    def pass_seconds(self, num_tokens: int) -> float:
        """Return the seconds that KV of `num_tokens` adds to every pass."""
        return num_tokens * self.token_bytes / self.read_bytes_per_second

    def pays(self, cost: CostModel, num_running: int, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` pays beside `num_running` others."""
        if not num_running or not self.token_bytes:
            return True
        planned = cost.planned_seconds(num_running)
        # Measured seconds of two sizes differ by more than one token takes.
        computing = cost.planned_seconds(num_running + 1) - planned
        share = cost.seconds(num_running) / num_running
        return computing + self.pass_seconds(num_tokens) <= share
