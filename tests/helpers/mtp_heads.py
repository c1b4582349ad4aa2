"""Tiny random checkpoints with an MTP head, in the layouts of several families, and the head as
transformers runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints import save_tiny_checkpoint

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
    from transformers.modeling_layers import MtpModel

LAYOUTS = {
    # transformers takes the head's norm from the last layer, which has to be one with attention
    "qwen3.5": {"mtp_num_hidden_layers": 1, "num_hidden_layers": 4},
    "qwen3.5-tied": {
        "mtp_num_hidden_layers": 1,
        "num_hidden_layers": 4,
        "tie_word_embeddings": True,
    },
    "glm4-moe": {"num_nextn_predict_layers": 1},
    "deepseek-v3": {"num_nextn_predict_layers": 1},
}
_OUTER = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}


def save_with_mtp_head(layout: str, directory: Path, seed: int = 0, **overrides: object) -> Path:
    """Write a random fp32 checkpoint with a head."""
    import torch
    from safetensors.torch import save_file

    family = layout.removesuffix("-tied")
    save_tiny_checkpoint(family, directory, seed, **{**LAYOUTS[layout], **overrides})
    model = load_target(directory)
    head = new_head(model)
    generator = torch.Generator().manual_seed(seed + 1)
    own = {}
    for name, parameter in head.layers.state_dict().items():
        values = torch.randn(parameter.shape, generator=generator) * 0.25
        own[_stored(name, layout, model)] = values + (parameter.ndim == 1)
    save_file(own, directory / "model-mtp.safetensors", metadata={"format": "pt"})
    _add_to_index(directory, own)
    return directory


def load_target(directory: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    config = model.config
    config.num_mtp_layers = 1
    if getattr(config, "layer_types", None):
        config.mtp_layer_types = ["full_attention"]
    if getattr(config, "mlp_layer_types", None):
        config.mtp_mlp_layer_types = [config.mlp_layer_types[-1]]
    return model


def new_head(model: PreTrainedModel) -> MtpModel:
    """Return transformers' head of a model, with values that nobody set."""
    from transformers.modeling_layers import MtpModel

    model.config._attn_implementation = "eager"
    return MtpModel(model, 1).eval()


def load_head(directory: Path) -> tuple[PreTrainedModel, MtpModel]:
    """Return a target and its head as transformers computes them, with the file's tensors."""
    import torch
    from safetensors.torch import load_file

    model = load_target(directory)
    head = new_head(model)
    stored = load_file(directory / "model-mtp.safetensors")
    layout = "qwen3.5" if model.config.model_type.startswith("qwen3_5") else "other"
    own = {name: stored[_stored(name, layout, model)] for name in head.layers.state_dict()}
    head.layers.load_state_dict(own)
    with torch.no_grad():
        head.tie_with_main_model(model)
    return model, head


def head_logits(directory: Path, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the head's logits [n - 1, vocab] after tokens 1.., its last hidden states)."""
    import torch
    from transformers.cache_utils import MtpCache

    model, head = load_head(directory)
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[:, :-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        positions = torch.arange(1, ids.shape[1])[None]
        states = head.forward_layer(0, hidden, positions, cache, input_ids=ids[:, 1:])
        return model.lm_head(states)[0], states[0]


def _stored(name: str, layout: str, model: PreTrainedModel) -> str:
    """Return the name in a checkpoint of a tensor of MtpModel.layers."""
    _, part, rest = name.split(".", 2)
    if layout.startswith("qwen3.5"):
        if part == "mtp_block":
            return f"mtp.layers.0.{rest}"
        return f"mtp.{_OUTER.get(part, 'norm')}.{rest}"
    place = f"model.layers.{model.config.num_hidden_layers}"
    if part == "mtp_block":
        return f"{place}.{_expert_names(rest)}"
    return f"{place}.{'shared_head.norm' if part == 'post_norm' else part}.{rest}"


def _expert_names(rest: str) -> str:
    return rest


def _add_to_index(directory: Path, own: dict[str, torch.Tensor]) -> None:
    import json

    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(own, "model-mtp.safetensors")
    path.write_text(json.dumps(index))
