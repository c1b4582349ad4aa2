"""Tiny random assistants beside tiny Gemma 4 targets, and transformers' generator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import VOCAB

if TYPE_CHECKING:
    import torch

SLIDING, FULL = "sliding_attention", "full_attention"
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": [SLIDING, SLIDING, FULL],
    "sliding_window": 6,
    "max_position_embeddings": 256,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
"""For the Gemma 4 target of checkpoints.py."""


@contextmanager
def queries_only() -> Iterator[None]:
    """Let transformers build assistants: version 5.23 refuses a model all of whose layers attend to
    keys of other ones, which every assistant is."""
    from transformers import Gemma4TextConfig

    original = Gemma4TextConfig.kv_sharing_modes

    def modes(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers < config.num_hidden_layers:
            return original.fget(config)
        return ["reuse"] * config.num_hidden_layers

    Gemma4TextConfig.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        Gemma4TextConfig.kv_sharing_modes = original


def save_assistant(
    directory: Path, *, seed: int = 1, clusters: bool = False, **changes: Any
) -> Path:
    """Write a random fp32 assistant.

    clusters: whether it computes logits of some of 8 clusters of 12 tokens alone.
    changes: of the language model's config; `backbone_hidden_size` of the head's.
    """
    import torch
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    width = changes.pop("backbone_hidden_size", 32)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**{**_TEXT, **changes}),
        backbone_hidden_size=width,
        use_ordered_embeddings=clusters,
        num_centroids=8,
        centroid_intermediate_top_k=3,
    )
    with queries_only():
        model = Gemma4AssistantForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
        if clusters:
            order = torch.randperm(VOCAB, generator=generator)
            model.masked_embedding.token_ordering.copy_(order)
    model.save_pretrained(directory)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class Reference:
    """transformers' generator for a target and an assistant: proposals after a context of which the
    target has computed all tokens but the last."""

    def __init__(self, target_directory: Path, head_directory: Path) -> None:
        from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

        self._target = AutoModelForCausalLM.from_pretrained(
            target_directory, attn_implementation="eager"
        )
        with queries_only():
            self._head = Gemma4AssistantForCausalLM.from_pretrained(
                head_directory, attn_implementation="eager"
            )

    def candidates(
        self, context_ids: Sequence[int], n_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Return (the next tokens, their logits [n_tokens, vocab])."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation.candidate_generator import (
            SinglePositionMultiTokenCandidateGenerator,
        )

        self._head.generation_config.num_assistant_tokens = n_tokens
        generator = SinglePositionMultiTokenCandidateGenerator(
            self._head,
            self._target.get_input_embeddings(),
            GenerationConfig(max_length=10_000, do_sample=False),
        )
        ids = torch.tensor([context_ids])
        with torch.no_grad():
            outputs = self._target(
                ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True
            )
            candidates, logits = generator.get_candidates(
                ids, {"attention_mask": torch.ones_like(ids)}, outputs, False, 0
            )
        assert logits is not None, "there is room for candidates"
        return candidates[0, len(context_ids) :].tolist(), logits[0]
