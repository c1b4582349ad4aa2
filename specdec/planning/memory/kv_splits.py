"""Divisions of a KV cache between memory and a file that are worth a comparison."""

from __future__ import annotations

from dataclasses import replace

from backends.contract.source import KvSplit

MIN_PROMPT_TOKENS = 512
"""Minimum prompt tokens of a pass that are planned for a KV cache that is partly in a file."""
MAX_ACTIVATION_SHARE = 1 / 8
"""Maximum share of the budget for the activations of more prompt tokens: while a sequence is
decoded, they hold layers, but not KV."""
_BLOCK_TOKENS = 64
"""Tokens by which KV in memory grows."""
_NUM_STEPS = 4
"""Steps from the least KV in memory to the most."""


def prompt_sizes(ctx_size: int) -> list[int]:
    """Return the prompt tokens of a pass to choose from, the most first: every pass over a part of
    a prompt reads the layers, and the KV of the parts before it."""
    sizes = [ctx_size]
    while sizes[-1] > MIN_PROMPT_TOKENS:
        sizes.append(max(MIN_PROMPT_TOKENS, sizes[-1] // 2))
    return sizes


def larger_splits(smallest: KvSplit, growth: int) -> list[KvSplit]:
    """Return the divisions with up to `growth` more tokens in memory, the smallest first."""
    n_blocks = growth // _BLOCK_TOKENS
    steps = sorted({n_blocks * i // _NUM_STEPS for i in range(_NUM_STEPS + 1)})
    hot_tokens = smallest.hot_tokens
    return [replace(smallest, hot_tokens=hot_tokens + n * _BLOCK_TOKENS) for n in steps]
