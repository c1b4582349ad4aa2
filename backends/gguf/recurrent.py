"""GGUF architectures with recurrent layers: those that run, and why others do not.

An architecture runs if histories of sequences have the bits of one token per pass on a tiny random
file (tests/backends/llama_states).
"""

from __future__ import annotations

from backends.contract.backend import UnsupportedModel
from backends.gguf.formats import check_formats
from backends.gguf.model import GgufModel

TRIED = frozenset(
    "qwen35 qwen35moe qwen3next nemotron_h nemotron_h_moe granitehybrid lfm2 lfm2moe falcon-h1 "
    "jamba mamba mamba2 plamo2 kimi-linear kimi-k3".split()
)
"""Architectures that run."""
_ROWS = "llama.cpp computes other numbers for a token in a batch than for the same token alone"
REFUSED = dict.fromkeys(("rwkv7", "arwkv7"), _ROWS)
"""Reasons why an architecture does not run."""
_UNTRIED = "its recurrent layers have not been compared with plain decoding"


def refuse_untried(model: GgufModel) -> None:
    """Raise UnsupportedModel for a recurrent architecture that was not found to be right."""
    if not model.is_recurrent:
        return
    if model.architecture not in TRIED:
        reason = REFUSED.get(model.architecture, _UNTRIED)
        raise UnsupportedModel(
            f"{model.path} ({model.architecture}) has recurrent layers and does not run: {reason}; "
            "run it as a checkpoint if there is one, or take another model"
        )
    check_formats(model.index.values())
