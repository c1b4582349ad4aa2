"""What the plan expects of several sequences that share passes: tokens per second of all together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from specdec.drafters.model import level_width
from specdec.planning.memory.pinnable import TEXT_TOKENS
from specdec.planning.run_plan import RunPlan
from specdec.policy.assumptions import expected_tokens, likely_levels


@dataclass(frozen=True)
class Together:
    """Texts that decode: their prompts are not counted, and the KV cache is to have room for all.

    tree_tokens: draft tokens of each text's tree, those that bring the most; 0: plain.
    """

    num_seqs: int
    plain_tokens_per_second: float
    tokens_per_second: float
    tree_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        line = (
            f"{self.num_seqs} sequences at once: predicted {self.plain_tokens_per_second:.2f} tokens/s "
            "together plain"
        )
        if self.tree_tokens:
            tokens = "token" if self.tree_tokens == 1 else "tokens"
            line += (
                f", {self.tokens_per_second:.2f} tokens/s with {self.tree_tokens} draft {tokens} "
                "each"
            )
        return [f"{line}; prompts not counted"]


def plan_together(plan: RunPlan, num_seqs: int, width: int) -> Together:
    """With trees of the size that brings the most, up to that of one text alone.

    width: most branches below one token of a tree.
    """
    chosen = plan.chosen.decoding(num_seqs * TEXT_TOKENS)
    target, draft = chosen.target, chosen.draft

    def rate(n_tree: int) -> float:
        if not n_tree:
            return num_seqs / target.seconds(num_seqs)
        assert draft is not None, "without one there are no trees"
        n_levels = min(chosen.depth, likely_levels(n_tree, width))
        n_abreast = num_seqs * min(n_tree, level_width(n_tree))
        seconds = target.seconds(num_seqs * (1 + n_tree)) + n_levels * draft.seconds(n_abreast)
        return num_seqs * expected_tokens(n_tree, n_levels) / seconds

    limit = 0 if draft is None else chosen.n_tree
    sizes = {0, limit, *(2**i for i in range(limit.bit_length()))}
    best = max(sorted(sizes), key=rate)
    return Together(num_seqs, rate(0), rate(best), best)
