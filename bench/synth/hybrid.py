"""Growth of a hybrid (Qwen3.5): the place of every weight of its layers.

Heads have norms of their own, whose epsilon is the model's and matters there. So hidden states are
larger instead of epsilon smaller: embedding and outputs are multiplied by sqrt(D / d).

Norms multiply by 1 + weight, so scaled gains are stored less one; a GGUF file has the gains. Heads
of Gated DeltaNet that are added read the hidden state and write a state, but their output columns
are zero. In a GGUF file the value heads of one key head are not neighbours: ggml repeats the key
heads in turn (convert_hf_to_gguf.py).

A dense model becomes a mixture by its shared expert, which has the MLP: half of it passes the gate,
whose weights are zero (a sigmoid of 0), so its outputs are doubled. Routers are random, and routed
experts are read and computed, but output zero.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.synth.growth import GrowthPlanner
from bench.synth.nemotron import NemotronPlanner
from bench.synth.shapes import LlamaShape, Recurrent, SynthError
from bench.synth.tensors import Fill, Patch, TensorPlan

_BLOCK = 256  # numbers that llama.cpp rounds together, at most (Q8_K)
_HALF_PASSES = 2.0
MTP_LAYER = "mtp.layers.0."
"""Prefix of the tensors of the MTP head's layer."""


class HybridPlanner(GrowthPlanner):
    """Planner of the tensors of a Qwen3.5, dense or a mixture.

    for_gguf: plans the values of a GGUF file, whose names of tensors stay the checkpoint's.
    """

    def __init__(self, source: LlamaShape, grown: LlamaShape, *, for_gguf: bool) -> None:
        super().__init__(source, grown)
        assert source.recurrent is not None
        assert grown.recurrent is not None
        self.few, self.many = source.recurrent, grown.recurrent
        self.offset = 0.0 if for_gguf else -1.0
        """Added to gains: the weight of 1 + weight."""
        self.for_gguf = for_gguf
        self.hidden_scale = 1 / self.norm_scale
        _check_heads(self.few, self.many)

    def _gain(self, name: str, n: int, source: str | None, scale: float = 1.0) -> TensorPlan:
        """Return a norm of `n` gains, of which the source has the first."""
        n_source = n if scale == 1.0 else self.source.hidden_size
        patches = (Patch(0, 0, 1, n_source, source, scale=scale, offset=self.offset),)
        return TensorPlan(name, (n,), Fill.GAIN, patches if source else (), scale, self.offset)

    def _norm(self, name: str, source: str | None) -> TensorPlan:
        return self._gain(name, self.grown.hidden_size, source, self.norm_scale)

    def tensors(self) -> list[TensorPlan]:
        return super().tensors() + (self._mtp_head() if self.grown.has_mtp_head else [])

    def _mtp_head(self) -> list[TensorPlan]:
        """Return the head: a layer of attention, whose input is projected from two normed vectors
        side by side, the token's embedding and the hidden state after the final norm."""
        d, big_d = self.source.hidden_size, self.grown.hidden_size
        projection, norm = "mtp.fc.weight", "input_layernorm.weight"
        halves = [
            Patch(
                0, half * big_d, d, d, projection, source_column=half * d, scale=self.hidden_scale
            )
            for half in (0, 1)
        ]
        norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
        prefix = MTP_LAYER
        return [
            TensorPlan(projection, (big_d, 2 * big_d), Fill.ZERO, tuple(halves)),
            *(self._norm(name, name) for name in norms),
            self._norm(prefix + norm, prefix + norm),
            *self._gated_attention(prefix, prefix),
            *self._feed_forward(self.grown.n_layers, prefix, prefix),
            self._norm("mtp.norm.weight", "mtp.norm.weight"),
        ]

    def _attention(self, index: int, prefix: str, origin: str | None) -> Iterator[TensorPlan]:
        if self.grown.is_recurrent(index):
            yield from self._delta_net(f"{prefix}linear_attn.", origin and f"{origin}linear_attn.")
        else:
            yield from self._gated_attention(prefix, origin)

    def _gated_attention(self, prefix: str, origin: str | None) -> Iterator[TensorPlan]:
        """Yield attention: a query head's rows are followed by those of its output gate."""
        e, d, big_d = self.source.head_dim, self.source.hidden_size, self.grown.hidden_size
        q, k, v, o = (f"self_attn.{x}_proj.weight" for x in "qkvo")
        source = origin or ""
        queries = [
            Patch(slot * 2 * e, 0, 2 * e, d, source + q, source_row=head * 2 * e)
            for head, slot in enumerate(self.heads.query_slots)
        ]
        num_rows, num_kv_rows = self.grown.n_heads * e, self.grown.n_kv_heads * e
        for name, shape, fill, patches in (
            (q, (2 * num_rows, big_d), Fill.RANDOM, queries),
            (k, (num_kv_rows, big_d), Fill.RANDOM, self._kv_patches(source + k)),
            (v, (num_kv_rows, big_d), Fill.RANDOM, self._kv_patches(source + v)),
            (o, (big_d, num_rows), Fill.ZERO, self._output_patches(source + o)),
        ):
            yield TensorPlan(prefix + name, shape, fill, tuple(patches) if origin else ())
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            yield self._gain(prefix + name, e, origin and origin + name)

    def _delta_net(self, prefix: str, origin: str | None) -> Iterator[TensorPlan]:
        d, big_d, e = self.source.hidden_size, self.grown.hidden_size, self.many.head_dim
        source = origin or ""

        def plan(name: str, shape: tuple[int, ...], fill: Fill, patches: list[Patch]) -> TensorPlan:
            return TensorPlan(prefix + name, shape, fill, tuple(patches) if origin else ())

        def rows(name: str, n_columns: int, size: int) -> list[Patch]:
            return [
                Patch(to * size, 0, size, n_columns, source + name, source_row=head * size)
                for head, to in self._value_slots()
            ]

        def mixed(name: str, n_columns: int) -> list[Patch]:
            return [
                Patch(to * e, 0, e, n_columns, source + name, source_row=row * e)
                for row, to in self._mixed_slots()
            ]

        n_mixed = (2 * self.many.n_key_heads + self.many.n_value_heads) * e
        n_values, n_heads = self.many.n_value_heads * e, self.many.n_value_heads
        names = [f"in_proj_{x}.weight" for x in ("qkv", "z", "b", "a")]
        yield plan(names[0], (n_mixed, big_d), Fill.RANDOM, mixed(names[0], d))
        yield plan(names[1], (n_values, big_d), Fill.RANDOM, rows(names[1], d, e))
        for name in names[2:]:
            yield plan(name, (n_heads, big_d), Fill.RANDOM, rows(name, d, 1))
        conv, kernel = "conv1d.weight", self.many.kernel
        shape = (n_mixed, kernel) if self.for_gguf else (n_mixed, 1, kernel)
        yield plan(conv, shape, Fill.RANDOM, mixed(conv, kernel))
        for name in ("A_log", "dt_bias"):
            of_heads = [
                Patch(0, to, 1, 1, source + name, source_column=head)
                for head, to in self._value_slots()
            ]
            sign = -1.0 if self.for_gguf and name == "A_log" else 1.0
            patches = tuple(of_heads) if origin else ()
            yield TensorPlan(prefix + name, (n_heads,), Fill.GAIN, patches, sign)
        norm = "norm.weight"
        whole = (Patch(0, 0, 1, e, source + norm),) if origin else ()
        yield TensorPlan(prefix + norm, (e,), Fill.GAIN, whole)
        out = "out_proj.weight"
        columns = [
            Patch(0, to * e, d, e, source + out, source_column=head * e, scale=self.hidden_scale)
            for head, to in self._value_slots()
        ]
        yield plan(out, (big_d, n_values), Fill.ZERO, columns)

    def _value_slots(self) -> list[tuple[int, int]]:
        """Return pairs: the source's value head, and its place in the grown model."""
        few, many = self.few, self.many
        pairs = []
        for head in range(few.n_value_heads):
            key, place = divmod(head, few.n_value_heads // few.n_key_heads)
            ratio = many.n_value_heads // many.n_key_heads
            slot = place * many.n_key_heads + key if self.for_gguf else key * ratio + place
            pairs.append((head, slot))
        return pairs

    def _mixed_slots(self) -> list[tuple[int, int]]:
        """Return pairs of head-sized rows of in_proj_qkv: queries, keys, then values."""
        few, many = self.few.n_key_heads, self.many.n_key_heads
        keys = [(part * few + key, part * many + key) for part in (0, 1) for key in range(few)]
        values = [(2 * few + head, 2 * many + slot) for head, slot in self._value_slots()]
        return keys + values

    def _feed_forward(self, index: int, prefix: str, origin: str | None) -> list[TensorPlan]:
        experts, big_d = self.grown.experts, self.grown.hidden_size
        norm = "post_attention_layernorm.weight"
        plans = [self._norm(prefix + norm, origin and origin + norm)]
        if experts is None:
            big_f = self.grown.intermediate_size
            return plans + self._mlp(f"{prefix}mlp.", big_f, origin and f"{origin}mlp.", 1.0)
        plans.append(TensorPlan(prefix + "mlp.gate.weight", (experts.n, big_d), Fill.RANDOM))
        for number in range(experts.n):
            expert = f"{prefix}mlp.experts.{number}."
            plans += self._mlp(expert, experts.intermediate_size, None, 1.0)
        shared = f"{prefix}mlp.shared_expert."
        size = self.grown.intermediate_size
        plans += self._mlp(shared, size, origin and f"{origin}mlp.", _HALF_PASSES)
        gate = f"{prefix}mlp.shared_expert_gate.weight"
        return [*plans, TensorPlan(gate, (1, big_d), Fill.ZERO)]

    def _mlp(
        self, prefix: str, big_f: int, origin: str | None, out_scale: float
    ) -> list[TensorPlan]:
        d, f, big_d = self.source.hidden_size, self.source.intermediate_size, self.grown.hidden_size
        gate, up, down = (f"{name}_proj.weight" for name in ("gate", "up", "down"))
        source, n_silent = origin or "", min(big_f, f + -f % _BLOCK) - f

        def plan(name: str, shape: tuple[int, int], fill: Fill, *patches: Patch) -> TensorPlan:
            return TensorPlan(prefix + name, shape, fill, patches if origin else ())

        # Neurons in the source's last block output zero, or they would change its rounding.
        silent = [Patch(f, 0, n_silent, d, scale=0.0)] if n_silent > 0 else []
        columns = [Patch(0, f, d, n_silent, scale=0.0)] if n_silent > 0 else []
        first = Patch(0, 0, f, d, source + gate)
        output = Patch(0, 0, d, f, source + down, scale=out_scale * self.hidden_scale)
        return [
            plan(gate, (big_f, big_d), Fill.RANDOM, first, *silent),
            plan(up, (big_f, big_d), Fill.RANDOM, Patch(0, 0, f, d, source + up)),
            plan(down, (big_d, big_f), Fill.ZERO, output, *columns),
        ]


def tensor_plans(
    source: LlamaShape, grown: LlamaShape, *, for_gguf: bool = False
) -> list[TensorPlan]:
    """Return all tensors of a grown model, in the order of writing.

    Raises:
        SynthError: the source does not fit.
    """
    if grown.mamba is not None:
        return NemotronPlanner(source, grown, for_gguf=for_gguf).tensors()
    if grown.recurrent is not None:
        return HybridPlanner(source, grown, for_gguf=for_gguf).tensors()
    return GrowthPlanner(source, grown).tensors()


def _check_heads(few: Recurrent, many: Recurrent) -> None:
    """Raise SynthError naming what differs or is too small."""
    for what, small, large in (
        ("key heads", few.n_key_heads, many.n_key_heads),
        ("value heads of a key head", few.n_values_of_key, many.n_values_of_key),
    ):
        if small > large:
            raise SynthError(
                f"a model cannot be grown to less than it has: {what} {small} > {large}"
            )
    for what, ours, theirs in (
        ("head dimensions", few.head_dim, many.head_dim),
        ("kernels", few.kernel, many.kernel),
    ):
        if ours != theirs:
            raise SynthError(f"{what} of recurrent layers differ: {ours} and {theirs}")
