"""`specdec plan`: the predicted throughput of several sequences, for the user."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from offload.units import format_bytes
from specdec.metrics.renamed import with_old_names
from specdec.planning.run_plan import RunPlan
from specdec.planning.throughput import Throughput, fastest_together


@dataclass(frozen=True)
class Together:
    """Throughput of the number of sequences that is fastest within the plan's KV cache.

    kv_tokens, kv_bytes: capacity of the target's KV cache.
    """

    throughput: Throughput
    kv_tokens: int
    kv_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return with_old_names(asdict(self.throughput))

    def lines(self) -> list[str]:
        result = self.throughput
        line = (
            f"{result.num_seqs} sequences at once: predicted "
            f"{result.plain_tokens_per_second:.2f} tokens/s in total without a draft"
        )
        if result.tree_tokens:
            tokens = "token" if result.tree_tokens == 1 else "tokens"
            line += (
                f", {result.tokens_per_second:.2f} tokens/s with {result.tree_tokens} draft "
                f"{tokens} each"
            )
        return [
            f"{line}, prompts not counted; the KV cache of {format_bytes(self.kv_bytes)} holds "
            f"{self.kv_tokens} tokens of all sequences together"
        ]


def plan_together(plan: RunPlan, num_seqs: int, width: int) -> Together:
    """Predict the throughput of up to `num_seqs` sequences.

    width: maximum number of branches below one token of a tree.
    """
    memory_plan = plan.chosen.memory_plan
    ledger = memory_plan.budget if memory_plan.vram is None else memory_plan.vram
    kv_bytes = dict(ledger.table()).get("target KV cache", 0)
    return Together(fastest_together(plan.chosen, num_seqs, width), plan.kv_tokens, kv_bytes)
