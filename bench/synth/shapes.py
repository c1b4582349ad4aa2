"""Shapes of well-known models; `bench.synth.sizing` adjusts them to a size.

Only shapes: no weight of these models is used. Notation: D hidden size, F intermediate size,
N layers, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from offload.errors import SpecdecError


class SynthError(SpecdecError, ValueError):
    """Checkpoint that cannot be grown as requested; the message says why and what would work."""


@dataclass(frozen=True)
class Experts:
    """Routed experts of each layer of a mixture."""

    n: int
    n_used: int  # for a token
    intermediate_size: int  # of one


@dataclass(frozen=True)
class Recurrent:
    """Gated DeltaNet layers of a hybrid; one layer in `attention_every` is one of attention."""

    n_key_heads: int
    n_value_heads: int
    head_dim: int  # of keys and values
    kernel: int  # of the convolution
    attention_every: int

    @property
    def n_values_of_key(self) -> int:
        """Number of value heads of one key head."""
        return self.n_value_heads // self.n_key_heads

    def parameters(self, hidden_size: int) -> int:
        """Number of parameters of one such layer beside its MLP and its norms."""
        values = self.n_value_heads * self.head_dim
        mixed = 2 * self.n_key_heads * self.head_dim + values
        outer = hidden_size * (mixed + 2 * values + 2 * self.n_value_heads)
        return outer + mixed * self.kernel + 2 * self.n_value_heads + self.head_dim


@dataclass(frozen=True)
class Mamba:
    """Layers of a NemotronH, which have one mixer each, and the sizes of its Mamba-2 layers."""

    pattern: str  # of layers, repeated: M Mamba-2, * attention, - MLP, E experts
    n_heads: int
    n_groups: int
    head_dim: int
    state_size: int
    kernel: int  # of the convolution

    @property
    def n_channels(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Channels of the convolution: inputs, then B and C of all groups."""
        n_grouped = self.n_groups * self.state_size
        return self.n_channels, n_grouped, n_grouped

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the input projection: gates, channels of the convolution, time steps."""
        return self.n_channels, *self.mixed, self.n_heads

    def kind_of(self, layer: int) -> str:
        """Return the letter of a layer."""
        return self.pattern[layer % len(self.pattern)]

    def parameters(self, hidden_size: int) -> int:
        """Number of parameters of one Mamba-2 layer beside its first norm."""
        outer = hidden_size * (sum(self.rows) + self.n_channels)
        return outer + sum(self.mixed) * (self.kernel + 1) + 3 * self.n_heads + self.n_channels


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama, of a mixture with the same attention (Qwen3-MoE), or of a hybrid of
    attention and recurrent layers (Qwen3.5, NemotronH), dense or a mixture.

    The MLP of a hybrid that is a mixture is its shared expert.
    """

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool  # the output head is the embedding
    experts: Experts | None = None  # in the MLP's place
    recurrent: Recurrent | None = None
    has_mtp_head: bool = False  # of a hybrid: one more layer, of attention
    mamba: Mamba | None = None

    @property
    def is_hybrid(self) -> bool:
        return self.recurrent is not None or self.mamba is not None

    def kind_of(self, layer: int) -> str:
        """Return what a layer computes; an MLP becomes a shared expert beside routed ones."""
        if self.mamba is not None:
            return self.mamba.kind_of(layer).replace("E", "-")
        return "recurrent" if self.is_recurrent(layer) else "attention"

    def is_recurrent(self, layer: int) -> bool:
        """Return True if a layer has a recurrent state instead of keys and values."""
        return self.recurrent is not None and (layer + 1) % self.recurrent.attention_every != 0

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one decoder layer; of a hybrid's, the mean."""
        if self.recurrent is not None:
            return self._hybrid_layer_parameters(self.recurrent)
        if self.mamba is not None:
            return self._mamba_parameters(self.mamba) // self.n_layers
        attention = 2 * self.hidden_size * self.head_dim * (self.n_heads + self.n_kv_heads)
        norms = 2 * self.hidden_size
        if self.experts is None:
            return attention + 3 * self.hidden_size * self.intermediate_size + norms
        expert = 3 * self.hidden_size * self.experts.intermediate_size
        routed = self.experts.n * (expert + self.hidden_size)  # with the router's row
        return attention + routed + norms + 2 * self.head_dim  # of queries and keys, too

    def _hybrid_layer_parameters(self, recurrent: Recurrent) -> int:
        every = recurrent.attention_every
        mixers = self._gated_attention + (every - 1) * recurrent.parameters(self.hidden_size)
        return mixers // every + self._hybrid_feed_forward

    def _mamba_parameters(self, mamba: Mamba) -> int:
        """Number of parameters of all layers of a NemotronH."""
        d, experts = self.hidden_size, self.experts
        mlp = 2 * d * self.intermediate_size
        of_kind = {
            "M": mamba.parameters(d),
            "*": 2 * d * self.head_dim * (self.n_heads + self.n_kv_heads),
            "-": mlp,
        }
        if experts is not None:
            routed = 2 * d * experts.intermediate_size + d + 1  # with the router's row and bias
            of_kind["E"] = mlp + experts.n * routed
        return sum(d + of_kind[mamba.kind_of(layer)] for layer in range(self.n_layers))

    @property
    def _gated_attention(self) -> int:
        heads = self.head_dim * (3 * self.n_heads + 2 * self.n_kv_heads)  # the queries' gates too
        return self.hidden_size * heads + 2 * self.head_dim

    @property
    def _hybrid_feed_forward(self) -> int:
        """Number of parameters of a layer's MLP or experts, and of its norms."""
        inner = 3 * self.intermediate_size + 2
        if self.experts is not None:
            routed = self.experts.n * (3 * self.experts.intermediate_size + 1)
            inner += routed + 1  # the shared expert's gate
        return self.hidden_size * inner

    @property
    def mtp_parameters(self) -> int:
        """Number of parameters of the MTP head: its layer, a projection of two, three norms."""
        if not self.has_mtp_head:
            return 0
        outer = self.hidden_size * (2 * self.hidden_size + 3)
        return self._gated_attention + self._hybrid_feed_forward + outer

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model; a tied head is counted once."""
        tables = 1 if self.tied else 2
        layers = self.n_layers * self.layer_parameters
        if self.mamba is not None:  # whose layers differ
            layers = self._mamba_parameters(self.mamba)
        return (
            layers
            + tables * self.vocab_size * self.hidden_size
            + self.hidden_size  # the final norm
            + self.mtp_parameters
        )

    def n_bytes(self, bytes_per_weight: float = 2) -> int:
        """Return the bytes of all weights on disk, all stored alike."""
        return round(self.parameters * bytes_per_weight)

    def with_head_dim(self, head_dim: int) -> LlamaShape:
        """Return the same matrices cut into heads of another size.

        Heads of 64 become half as many of 128: parameters, FLOPs and KV bytes per token stay.
        """
        if head_dim == self.head_dim:
            return self
        if self.n_heads * self.head_dim % head_dim or self.n_kv_heads * self.head_dim % head_dim:
            raise SynthError(
                f"{self.n_kv_heads} key/value heads of {self.head_dim} cannot be cut into heads "
                f"of {head_dim}, the source's head dimension; choose another shape"
            )
        return replace(
            self,
            n_heads=self.n_heads * self.head_dim // head_dim,
            n_kv_heads=self.n_kv_heads * self.head_dim // head_dim,
            head_dim=head_dim,
        )

    def with_routing_of(self, source: LlamaShape) -> LlamaShape:
        """Return the same bytes of experts, cut into the source's number of experts, with as many
        per token: routing is the source's. Hybrids keep theirs. Raises SynthError."""
        if (self.mamba is None) != (source.mamba is None):
            raise SynthError(
                "layers of Mamba-2 are grown from Mamba-2 alone, and the "
                f"{'source' if source.mamba is None else 'shape'} has none: choose another --like, "
                "or --from a small dense NemotronH (python -m bench.train.nemotron trains one)"
            )
        if (self.recurrent is None) != (source.recurrent is None):
            kinds = {True: "a hybrid", False: "none"}
            raise SynthError(
                f"the shape is {kinds[self.recurrent is not None]} of attention and recurrent "
                f"layers and the source {kinds[source.recurrent is not None]}: choose another "
                "--like, or another --from (pair:hybrid)"
            )
        if self.is_hybrid:
            return self
        if (self.experts is None) != (source.experts is None):
            kinds = {True: "dense", False: "a mixture of experts"}
            raise SynthError(
                f"the shape is {kinds[self.experts is None]} and the source "
                f"{kinds[source.experts is None]}: choose another --like, or another --from"
            )
        if self.experts is None or source.experts is None:
            return self
        size = self.experts.intermediate_size
        if self.experts.n != source.experts.n:
            size = self.experts.n * size // source.experts.n // _EXPERT_STEP * _EXPERT_STEP
        return replace(self, experts=replace(source.experts, intermediate_size=size))


class Storage(Protocol):
    """Storage of a model's weights."""

    @property
    def block_size(self) -> int:
        """Number of weights per block, in most of its matrices."""

    def model_bytes(self, shape: LlamaShape) -> int:
        """Return the bytes of all weights of a model of this shape."""


#                            D      F     N   H   K    E       V  tied
SHAPES: dict[str, LlamaShape] = {
    "llama-3.2-1b": LlamaShape(2048, 8192, 16, 32, 8, 64, 128_256, True),
    "llama-3.2-3b": LlamaShape(3072, 8192, 28, 24, 8, 128, 128_256, True),
    "llama-3-8b": LlamaShape(4096, 14_336, 32, 32, 8, 128, 128_256, False),
    "llama-3-70b": LlamaShape(8192, 28_672, 80, 64, 8, 128, 128_256, False),
    "llama-2-7b": LlamaShape(4096, 11_008, 32, 32, 32, 128, 32_000, False),
    "llama-2-13b": LlamaShape(5120, 13_824, 40, 40, 40, 128, 32_000, False),
    "llama-2-70b": LlamaShape(8192, 28_672, 80, 64, 8, 128, 32_000, False),
}
#                             D      F    N   H   K   E       V   tied          n  used  F of one
MIXTURES: dict[str, LlamaShape] = {
    "qwen3-30b-a3b": LlamaShape(2048, 6144, 48, 32, 4, 128, 151_936, False, Experts(128, 8, 768)),
    "gpt-oss-20b": LlamaShape(2880, 2880, 24, 64, 8, 64, 201_088, False, Experts(32, 4, 2880)),
    "mixtral-8x7b": LlamaShape(4096, 14_336, 32, 32, 8, 128, 32_000, False, Experts(8, 2, 14_336)),
}
# The shared expert of the 35B, 512 wide, is widened to hold the small model's MLP.
_GDN_OF_27B, _GDN_OF_35B = (Recurrent(16, n_values, 128, 4, 4) for n_values in (48, 32))
_MAMBA_OF_NANO = Mamba("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 64, 8, 64, 128, 4)
HYBRIDS: dict[str, LlamaShape] = {
    "qwen3.8-27b": LlamaShape(5120, 17_408, 64, 24, 4, 256, 248_320, False, recurrent=_GDN_OF_27B),
    "qwen3.6-35b-a3b": LlamaShape(
        2048, 768, 40, 16, 2, 256, 248_320, False, Experts(256, 8, 512), _GDN_OF_35B
    ),
    "nemotron-3-nano": LlamaShape(
        2688, 3712, 52, 32, 2, 128, 131_072, False, Experts(128, 6, 1856), mamba=_MAMBA_OF_NANO
    ),
}
MAX_LAYERS = 1024  # of a GGUF file that is read, far above any real model
_EXPERT_STEP = 32  # of their intermediate sizes: the smallest block of a quantised row


def named_shape(name: str) -> LlamaShape:
    """Return a well-known shape.

    Raises:
        SynthError: the name is not in `SHAPES`, `MIXTURES` or `HYBRIDS`.
    """
    known = SHAPES | MIXTURES | HYBRIDS
    try:
        return known[name.lower()]
    except KeyError:
        raise SynthError(f"unknown shape {name!r}; known: {', '.join(known)}") from None
