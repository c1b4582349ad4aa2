"""A prompt and a tree below it, and transformers' own logits for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-5
PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
# A tree below the prompt: two branches from the root, one of them forking again.
TREE_TOKENS = [7, 20, 30, 21, 22, 31, 40]
TREE_PARENTS = [-1, 0, 0, 1, 3, 2, 3]
TREE_LEAVES = [4, 5, 6]
"""The paths to these have all nodes of the tree."""


def reference_logits(directory: Path, token_ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].numpy()


def path_nodes(node: int) -> list[int]:
    """Return the nodes from the root to this one."""
    nodes = []
    while node != -1:
        nodes.append(node)
        node = TREE_PARENTS[node]
    return nodes[::-1]


def path_tokens(node: int) -> list[int]:
    return [TREE_TOKENS[n] for n in path_nodes(node)]


def scale(logits: np.ndarray) -> float:
    return max(1.0, float(np.abs(logits).max()))
