"""Predicted throughput of several sequences that share forward passes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.metrics.renamed import with_old_names
from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.run_plan import RunPlan
from specdec.policy.assumptions import expected_tokens, likely_levels
from specdec.policy.cost_model import run_tokens, runs_of_levels


@dataclass(frozen=True)
class Together:
    """Throughput of sequences that decode together, all in the KV cache, prompts not counted.

    tree_tokens: draft tokens of each sequence's tree, the number that is fastest; 0: plain.
    """

    num_seqs: int
    plain_tokens_per_second: float
    tokens_per_second: float
    tree_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return with_old_names(asdict(self))

    def lines(self) -> list[str]:
        line = (
            f"{self.num_seqs} sequences at once: predicted {self.plain_tokens_per_second:.2f} "
            "tokens/s together plain"
        )
        if self.tree_tokens:
            tokens = "token" if self.tree_tokens == 1 else "tokens"
            line += (
                f", {self.tokens_per_second:.2f} tokens/s with {self.tree_tokens} draft {tokens} "
                "each"
            )
        return [f"{line}; prompts not counted"]


def plan_together(plan: RunPlan, num_seqs: int, width: int) -> Together:
    """Predict the throughput with trees of the fastest size, up to that of a single sequence.

    width: maximum number of branches below one token of a tree.
    """
    chosen = plan.chosen.decoding(num_seqs * SEQUENCE_TOKENS)
    target, draft = chosen.target, chosen.draft

    def rate(n_tree: int) -> float:
        if not n_tree:
            return num_seqs / target.seconds(num_seqs)
        assert draft is not None, "without one there are no trees"
        n_levels = min(chosen.depth, likely_levels(n_tree, width))
        block_size = draft.compute.block_size
        run = draft.seconds(num_seqs * run_tokens(n_tree, block_size))
        drafting = runs_of_levels(n_levels, block_size) * run
        seconds = target.seconds(num_seqs * (1 + n_tree)) + drafting
        return num_seqs * expected_tokens(n_tree, n_levels) / seconds

    limit = 0 if draft is None else chosen.n_tree
    sizes = {0, limit, *(2**i for i in range(limit.bit_length()))}
    best = max(sorted(sizes), key=rate)
    return Together(num_seqs, rate(0), rate(best), best)
