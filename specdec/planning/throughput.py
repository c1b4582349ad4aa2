"""Predicted throughput of several sequences that share forward passes."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.planning.memory.pinnable import SEQUENCE_TOKENS
from specdec.planning.search import Alternative
from specdec.policy.assumptions import expected_tokens, likely_levels
from specdec.policy.cost_model import run_tokens, runs_of_levels


@dataclass(frozen=True)
class Throughput:
    """Throughput of sequences that decode together, all in the KV cache, prompts not counted.

    plain_tokens_per_second: without draft tokens.
    tree_tokens: draft tokens of each sequence's tree, the number that is fastest; 0: plain.
    """

    num_seqs: int
    plain_tokens_per_second: float
    tokens_per_second: float
    tree_tokens: int


def predict_throughput(chosen: Alternative, num_seqs: int, width: int) -> Throughput:
    """Predict the throughput with trees of the fastest size, up to that of a single sequence.

    width: maximum number of branches below one token of a tree.
    """
    chosen = chosen.decoding(num_seqs * SEQUENCE_TOKENS)
    target, draft = chosen.target, chosen.draft

    def rate(n_tree: int) -> float:
        if not n_tree:
            return num_seqs / target.seconds(num_seqs)
        assert draft is not None, "without one there are no trees"
        n_levels = min(chosen.depth, likely_levels(n_tree, width))
        block_size = draft.compute.block_size
        run = draft.seconds(num_seqs * run_tokens(n_tree, width, block_size))
        drafting = runs_of_levels(n_levels, block_size) * run
        seconds = target.seconds(num_seqs * (1 + n_tree)) + drafting
        return num_seqs * expected_tokens(n_tree, n_levels) / seconds

    limit = 0 if draft is None else chosen.n_tree
    sizes = {0, limit, *(2**i for i in range(limit.bit_length()))}
    best = max(sorted(sizes), key=rate)
    return Throughput(num_seqs, rate(0), rate(best), best)


def fastest_together(chosen: Alternative, max_num_seqs: int, width: int) -> Throughput:
    """Return the throughput of the number of sequences, up to `max_num_seqs` and as many as the KV
    cache has memory for, that is fastest: KV takes the place of layers, which are then read."""
    limit = max(1, min(max_num_seqs, chosen.memory_plan.kv_tokens // SEQUENCE_TOKENS))
    sizes = {limit, *(2**i for i in range(limit.bit_length()))}
    predicted = (predict_throughput(chosen, n, width) for n in sorted(sizes))
    return max(predicted, key=lambda item: item.tokens_per_second)
