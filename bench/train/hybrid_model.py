"""Small hybrid of recurrent and attention layers with an MTP head: Qwen3.5's text architecture."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from bench.train.data import MAX_POSITIONS
from bench.train.model import forward_logits
from specdec.training.loss import soft_loss
from specdec.training.repeated import NUM_STEPS, STEP_WEIGHT
from specdec.training.trainable import in_bf16


def hybrid_config(target: LlamaForCausalLM) -> Qwen3_5TextConfig:
    """Return the config of a Qwen3.5 with the target's vocabulary, 12 MB in bf16.

    Head sizes are those of the large models, of which it is grown to measure with.
    """
    config = target.config
    return Qwen3_5TextConfig(
        vocab_size=config.vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
        },
        tie_word_embeddings=True,
        mtp_num_hidden_layers=1,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=None,
    )


class MtpHead(nn.Module):
    """Multi-token prediction head, with the tensor names of Qwen3.5's checkpoints.

    Source: DeepSeek-V3 (2024), section 2.2; run repeatedly as one layer.
    """

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        attention = config.layer_types.index("full_attention")
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, attention)])
        self.norm, self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (
            Qwen3_5RMSNorm(size, eps=config.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rotary: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Return hidden states [batch_size, length, hidden] one token further.

        hidden: normed hidden states at each position; embedded: embeddings of the tokens after.
        """
        joined = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        states = self.fc(torch.cat(joined, dim=-1))
        states = self.layers[0](states, position_embeddings=rotary, attention_mask=None)
        return self.norm(states)


class Hybrid(nn.Module):
    """Hybrid model and its MTP head, trained together."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.main = Qwen3_5ForCausalLM(config)
        self.mtp = MtpHead(config)

    @property
    def config(self) -> Qwen3_5TextConfig:
        return self.main.config

    @property
    def device(self) -> torch.device:
        return self.main.device


def build_hybrid(target: LlamaForCausalLM, seed: int) -> Hybrid:
    """Return the hybrid before its training, in float32; its layers begin as no-ops."""
    torch.manual_seed(seed)
    model = Hybrid(hybrid_config(target)).float()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    with torch.no_grad():
        for layer in [*model.main.model.layers, *model.mtp.layers]:
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            (mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj).weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


def _rotary(inner: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return cosines and sines of all positions; text has the same one in each of three axes."""
    places = torch.arange(hidden.shape[1], device=hidden.device).expand(3, 1, -1)
    return tuple(inner.rotary_emb(hidden, places))


def hybrid_loss(
    target: LlamaForCausalLM, model: Hybrid, ids: torch.Tensor, argmax_weight: float
) -> torch.Tensor:
    """Return the loss of ids [batch_size, length + 1]: distillation, and that of the MTP head.

    The head learns the hybrid's own distribution, NUM_STEPS tokens ahead.
    """
    with torch.no_grad():
        teacher = forward_logits(target, ids[:, :-1]).float()
    ids = ids.to(model.device)
    with in_bf16(model.device):
        inner = model.main.model
        hidden = inner(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        own = model.main.lm_head(hidden)
        loss = soft_loss(teacher, own, argmax_weight)
        rotary = _rotary(inner, hidden)
        states = hidden.detach()
        for step in range(1, NUM_STEPS + 1):
            # A row at i has read tokens up to i, and gets token i + step to predict the next.
            embedded = inner.embed_tokens(ids.roll(-step, dims=1)[:, :-1]).detach()
            states = model.mtp(states, embedded, rotary)
            drafted = F.linear(states[:, :-step], model.main.lm_head.weight.detach())
            expected = own[:, step:].detach().float()
            loss = loss + STEP_WEIGHT**step * soft_loss(expected, drafted, argmax_weight)
    return loss


@torch.no_grad()
def mtp_agreement(model: Hybrid, ids: torch.Tensor) -> list[float]:
    """Return shares of positions where each step of the head has the hybrid's own top-1 token.

    ids: windows [batch_size, length + 1]. The steps read the window's tokens, not drafted ones.
    """
    ids = ids.to(model.device)
    with in_bf16(model.device):
        inner = model.main.model
        states = inner(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        own = model.main.lm_head(states).argmax(-1)
        rotary = _rotary(inner, states)
        shares = []
        for step in range(1, NUM_STEPS + 1):
            embedded = inner.embed_tokens(ids.roll(-step, dims=1)[:, :-1])
            states = model.mtp(states, embedded, rotary)
            drafted = model.main.lm_head(states[:, :-step]).argmax(-1)
            shares.append((drafted == own[:, step:]).float().mean().item())
    return shares
