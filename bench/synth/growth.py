"""Function-preserving expansion: the place of every weight.

The hidden state of the grown model holds the small model's in its first d of D dimensions and
zeros in the others, after every layer. That needs exact zeros in two places only:

- outputs: the rows of `o_proj` and `down_proj` and the columns of the embedding that write to
  the new dimensions are zero;
- additions: the columns of `o_proj` (and `down_proj`) that read added heads (neurons) are zero
  in the old rows too. In an added layer all of them are, so it adds nothing.

All other new weights multiply a zero, or are multiplied by one, and are random. An RMS norm
over D dimensions of which D - d are zero sees a mean square smaller by d / D, so its weight is
scaled by sqrt(d / D) and its epsilon by d / D. bench/synth/mixture.py has the layers of experts,
bench/synth/hybrid.py and bench/synth/nemotron.py recurrent ones.

Query head i of the small model belongs to its key/value head i // g. It goes to a slot of the
grown model whose group reads a copy of that key/value head; if the grown groups are smaller, the
key/value head is copied into several groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.synth.mixture import mixture_plans
from bench.synth.shapes import LlamaShape, SynthError
from bench.synth.tensors import Fill, Patch, TensorPlan


@dataclass(frozen=True)
class HeadMap:
    """Placement of the source's heads.

    query_slots[i] is the slot of the source's query head i; kv_sources[s] is the source's
    key/value head of which slot s holds a copy, or None.
    """

    query_slots: tuple[int, ...]
    kv_sources: tuple[int | None, ...]


def map_heads(source: LlamaShape, grown: LlamaShape) -> HeadMap:
    """Place the source's heads into the grown model, group by group.

    Raises:
        SynthError: the grown model has too few key/value heads to hold the copies.
    """
    group, grown_group = source.n_heads // source.n_kv_heads, grown.n_heads // grown.n_kv_heads
    copies = math.ceil(group / grown_group)
    if source.n_kv_heads * copies > grown.n_kv_heads:
        raise SynthError(
            f"{source.n_heads} heads in groups of {group} need at least "
            f"{source.n_kv_heads * copies} key/value heads when groups have {grown_group}; the "
            f"shape has {grown.n_kv_heads}: choose a shape with more"
        )
    slots = []
    for head in range(source.n_heads):
        kv_head, place = divmod(head, group)
        copy, offset = divmod(place, grown_group)
        slots.append((kv_head * copies + copy) * grown_group + offset)
    used = source.n_kv_heads * copies
    kv_sources = [slot // copies if slot < used else None for slot in range(grown.n_kv_heads)]
    return HeadMap(tuple(slots), tuple(kv_sources))


def layer_places(source: LlamaShape, grown: LlamaShape) -> dict[int, int]:
    """Map layers of the grown model to those of the source, spread evenly.

    So resident and streamed layers both include the source's. A hybrid's take the next place of
    their kind.
    """
    limit, last_places = grown.n_layers, []
    for layer in reversed(range(source.n_layers)):
        limit = max(_same_kind(source, layer, grown, range(limit)), default=-1)
        last_places.append(limit)
    if limit < 0:
        raise SynthError(
            f"{grown.n_layers} layers have no place for the source's {source.n_layers}: choose more"
        )
    places: dict[int, int] = {}
    for layer, last_place in enumerate(reversed(last_places)):
        even = layer * grown.n_layers // source.n_layers
        free = range(max(places, default=-1) + 1, last_place + 1)
        possible = _same_kind(source, layer, grown, free)
        places[next((i for i in possible if i >= even), possible[-1])] = layer
    return places


def _same_kind(source: LlamaShape, layer: int, grown: LlamaShape, places: range) -> list[int]:
    """Return the places of the grown model's layers that are of the kind of a source's layer."""
    return [i for i in places if grown.kind_of(i) == source.kind_of(layer)]


def check_growable(source: LlamaShape, grown: LlamaShape) -> None:
    """Raise SynthError naming the first size in which the source does not fit."""
    for what, small, large in (
        ("hidden size", source.hidden_size, grown.hidden_size),
        ("intermediate size", source.intermediate_size, grown.intermediate_size),
        ("number of layers", source.n_layers, grown.n_layers),
        ("vocabulary", source.vocab_size, grown.vocab_size),
    ):
        if small > large:
            raise SynthError(
                f"a model cannot be grown to less than it has: {what} {small} > {large}"
            )
    mixtures = source.experts, grown.experts
    if not grown.is_hybrid and (mixtures[0] is None) != (mixtures[1] is None):
        raise SynthError("a dense model cannot be grown to a mixture of experts, nor the reverse")
    if mixtures[0] is not None and mixtures[1] is not None:
        sizes = mixtures[0].intermediate_size, mixtures[1].intermediate_size
        if sizes[0] > sizes[1]:
            raise SynthError(
                f"a model cannot be grown to less than it has: size of an expert {sizes[0]} > "
                f"{sizes[1]}"
            )
    if source.head_dim != grown.head_dim:
        raise SynthError(f"head dimensions differ: {source.head_dim} and {grown.head_dim}")
    if grown.n_heads % grown.n_kv_heads:
        raise SynthError(
            f"{grown.n_heads} query heads are no multiple of {grown.n_kv_heads} key/value heads"
        )
    if (
        not grown.is_hybrid and grown.hidden_size % grown.n_heads
    ):  # which transformers refuses to load
        raise SynthError(
            f"hidden size {grown.hidden_size} is no multiple of {grown.n_heads} query heads"
        )
    map_heads(source, grown)


class GrowthPlanner:
    """Planner of every tensor of a grown model, in the order of writing."""

    embedding, final_norm = "model.embed_tokens.weight", "model.norm.weight"
    attention = "self_attn."
    """Prefix of a layer's matrices of attention."""

    def __init__(self, source: LlamaShape, grown: LlamaShape) -> None:
        check_growable(source, grown)
        self.source, self.grown = source, grown
        self.heads = map_heads(source, grown)
        self.places = layer_places(source, grown)
        self.norm_scale = math.sqrt(source.hidden_size / grown.hidden_size)
        self.hidden_scale = 1.0
        """The grown model's hidden states, in multiples of the source's."""

    def tensors(self) -> list[TensorPlan]:
        """Return all tensors: embedding, layers, final norm, and the head unless it is tied."""
        embedding = self.embedding
        plans = [self._table(embedding, embedding, Fill.ZERO, self.hidden_scale)]
        for index in range(self.grown.n_layers):
            plans += self._layer(index, self.places.get(index))
        plans.append(self._norm(self.final_norm, self.final_norm))
        if not self.grown.tied:
            head = embedding if self.source.tied else "lm_head.weight"
            plans.append(self._table("lm_head.weight", head, Fill.RANDOM))
        return plans

    def _table(self, name: str, source: str, new_columns: Fill, scale: float = 1.0) -> TensorPlan:
        """Return an embedding or head [V, D]; rows of padding ids are random in the old columns."""
        d, v = self.source.hidden_size, self.source.vocab_size
        patches = [Patch(0, 0, v, d, source, scale=scale)]
        if self.grown.vocab_size > v and new_columns is Fill.ZERO:
            patches.append(Patch(v, 0, self.grown.vocab_size - v, d))
        shape = (self.grown.vocab_size, self.grown.hidden_size)
        return TensorPlan(name, shape, new_columns, tuple(patches))

    def _norm(self, name: str, source: str | None) -> TensorPlan:
        d = self.source.hidden_size
        patches = (Patch(0, 0, 1, d, source, scale=self.norm_scale),) if source else ()
        return TensorPlan(name, (self.grown.hidden_size,), Fill.GAIN, patches, self.norm_scale)

    def _layer(self, index: int, source_index: int | None) -> list[TensorPlan]:
        """Return one decoder layer; without a source layer it is an exact no-op."""
        prefix = f"model.layers.{index}."
        origin = None if source_index is None else f"model.layers.{source_index}."
        name = "input_layernorm.weight"
        return [
            self._norm(prefix + name, origin and origin + name),
            *self._attention(index, prefix, origin),
            *self._feed_forward(index, prefix, origin),
        ]

    def _attention(self, index: int, prefix: str, origin: str | None) -> Iterator[TensorPlan]:
        """Yield what a layer computes with other tokens, its norms of heads excepted."""
        big_d, e = self.grown.hidden_size, self.grown.head_dim
        num_rows, num_kv_rows = self.grown.n_heads * e, self.grown.n_kv_heads * e
        q, k, v, o = (f"{self.attention}{x}_proj.weight" for x in "qkvo")
        source = origin or ""
        for name, shape, fill, patches in (
            (q, (num_rows, big_d), Fill.RANDOM, self._query_patches(source + q)),
            (k, (num_kv_rows, big_d), Fill.RANDOM, self._kv_patches(source + k)),
            (v, (num_kv_rows, big_d), Fill.RANDOM, self._kv_patches(source + v)),
            (o, (big_d, num_rows), Fill.ZERO, self._output_patches(source + o)),
        ):
            yield TensorPlan(prefix + name, shape, fill, tuple(patches) if origin else ())

    def _feed_forward(self, index: int, prefix: str, origin: str | None) -> list[TensorPlan]:
        """Return the second norm, and the MLP or the experts."""
        if self.grown.experts is not None:
            return mixture_plans(self.source, self.grown, index, self.places)
        d, f = self.source.hidden_size, self.source.intermediate_size
        big_d, big_f = self.grown.hidden_size, self.grown.intermediate_size
        norm = "post_attention_layernorm.weight"
        gate, up, down = (f"mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
        source = origin or ""

        def plan(name: str, shape: tuple[int, int], fill: Fill, patch: Patch) -> TensorPlan:
            return TensorPlan(prefix + name, shape, fill, (patch,) if origin else ())

        return [
            self._norm(prefix + norm, origin and origin + norm),
            plan(gate, (big_f, big_d), Fill.RANDOM, Patch(0, 0, f, d, source + gate)),
            plan(up, (big_f, big_d), Fill.RANDOM, Patch(0, 0, f, d, source + up)),
            plan(down, (big_d, big_f), Fill.ZERO, Patch(0, 0, d, f, source + down)),
        ]

    def _query_patches(self, source: str) -> list[Patch]:
        e, d = self.source.head_dim, self.source.hidden_size
        return [
            Patch(slot * e, 0, e, d, source, source_row=head * e)
            for head, slot in enumerate(self.heads.query_slots)
        ]

    def _kv_patches(self, source: str) -> list[Patch]:
        e, d = self.source.head_dim, self.source.hidden_size
        return [
            Patch(slot * e, 0, e, d, source, source_row=head * e)
            for slot, head in enumerate(self.heads.kv_sources)
            if head is not None
        ]

    def _output_patches(self, source: str) -> list[Patch]:
        e, d = self.source.head_dim, self.source.hidden_size
        return [
            Patch(0, slot * e, d, e, source, source_column=head * e, scale=self.hidden_scale)
            for head, slot in enumerate(self.heads.query_slots)
        ]
