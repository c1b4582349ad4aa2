"""Tiny random DFlash heads beside tiny targets, in both layouts, and transformers' generator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints import VOCAB

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BLOCK_SIZE = 6
MASK_TOKEN_ID = 3
TARGET_LAYERS = [0, 2]  # of three: transformers' last hidden state is normed
PUBLIC, FAMILY = "public", "transformers"
"""Layouts of a checkpoint."""
_LAYERS: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-6,
}
_PUBLIC_NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def save_dflash_head(
    directory: Path,
    layout: str = PUBLIC,
    *,
    window: int | None = None,
    seed: int = 1,
    **changes: Any,
) -> Path:
    """Write a random fp32 head for the targets of checkpoints.py with three layers.

    window: sliding window of the second layer; the first one sees everything.
    changes: of config.json; in the public layout block settings are changed there as well.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    types = ["full_attention", "full_attention" if window is None else "sliding_attention"]
    block = {
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": TARGET_LAYERS,
    }
    own = {**_LAYERS, "layer_types": types, "sliding_window": window or 64}
    model = MuseGlimmerAssistantModel(MuseGlimmerAssistantConfig(**own, **block))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    model.save_pretrained(directory)
    path = directory / "config.json"
    if layout == FAMILY:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return directory
    tensors = {_public_name(name): value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        **own,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "is_causal": False,
        "use_sliding_window": window is not None,
        "vocab_size": VOCAB,
        "num_target_layers": 3,
        "dflash_config": {**block, **{key: changes.pop(key) for key in block if key in changes}},
    }
    path.write_text(json.dumps({**config, **changes}))
    return directory


def _public_name(name: str) -> str:
    for start, place in _PUBLIC_NAMES.items():
        if name.startswith(start):
            return place + name.removeprefix(start)
    return name


class Reference:
    """transformers' generator for a target and a head in its layout, step by step."""

    def __init__(self, target_directory: Path, head_directory: Path) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig, MuseGlimmerAssistantModel
        from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

        self.target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            target_directory, attn_implementation="eager"
        )
        self._generator = DFlashTokenCandidateGenerator(
            MuseGlimmerAssistantModel.from_pretrained(head_directory),
            self.target.get_input_embeddings(),
            self.target.get_output_embeddings(),
            GenerationConfig(max_length=10_000, do_sample=False),
        )
        self._n_known = 0

    def marginals(self, context_ids: Sequence[int]) -> torch.Tensor:
        """Return logits [block - 1, vocab] after a context that has grown by accepted tokens."""
        import torch

        ids = torch.tensor([context_ids])
        with torch.no_grad():
            outputs = self.target(ids[:, :-1], output_hidden_states=True)
            outputs.hidden_states = tuple(
                states[:, self._n_known :] for states in outputs.hidden_states
            )
            n_new = ids.shape[1] - 1 - self._n_known
            places = torch.arange(ids.shape[1])[None]
            _, logits = self._generator.get_candidates(
                ids,
                {"position_ids": places, "attention_mask": torch.ones_like(ids)},
                outputs,
                is_first_iteration=False,
                n_last_matches=n_new - 1,
            )
        self._n_known = ids.shape[1] - 1
        assert logits is not None, "there is room for a block"
        return logits[0]
