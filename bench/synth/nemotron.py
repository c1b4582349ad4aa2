"""Growth of a NemotronH (Mamba-2, attention, MLPs): the place of every weight of its layers.

A layer has one norm and one mixer. As in other hybrids, hidden states are multiplied by
sqrt(D / d), so the epsilon of the norms stays (see bench/synth/hybrid.py).

A Mamba-2 layer normalises its output group by group, so groups keep their number of heads: the
source's groups come first, and output columns of added ones are zero.

An MLP, which has no gate, becomes the shared expert of a layer of experts. Routers are random, and
routed experts are read and computed, but output zero.
"""

from __future__ import annotations

from bench.synth.growth import GrowthPlanner
from bench.synth.shapes import LlamaShape, Mamba, SynthError
from bench.synth.tensors import Fill, Patch, TensorPlan

_BLOCK = 256  # numbers that llama.cpp rounds together, at most (Q8_K)
EMBEDDING, FINAL_NORM = "backbone.embeddings.weight", "backbone.norm_f.weight"


class NemotronPlanner(GrowthPlanner):
    """Planner of the tensors of a NemotronH.

    for_gguf: plans the values of a GGUF file, whose names of tensors stay the checkpoint's.
    """

    embedding, final_norm, attention = EMBEDDING, FINAL_NORM, "mixer."

    def __init__(self, source: LlamaShape, grown: LlamaShape, *, for_gguf: bool) -> None:
        super().__init__(source, grown)
        assert source.mamba is not None
        assert grown.mamba is not None
        self.few, self.many = source.mamba, grown.mamba
        self.for_gguf = for_gguf
        self.hidden_scale = 1 / self.norm_scale
        _check_groups(self.few, self.many)

    def _layer(self, index: int, source_index: int | None) -> list[TensorPlan]:
        prefix = f"backbone.layers.{index}."
        origin = None if source_index is None else f"backbone.layers.{source_index}."
        mixer, source = prefix + "mixer.", origin and origin + "mixer."
        kind, name = self.many.kind_of(index), "norm.weight"
        norm = self._norm(prefix + name, origin and origin + name)
        if kind == "M":
            return [norm, *self._mamba(mixer, source)]
        if kind == "*":
            return [norm, *self._attention(index, prefix, origin)]
        if kind == "E":
            return [norm, *self._experts(mixer, source)]
        return [norm, *self._mlp(mixer, self.grown.intermediate_size, source)]

    def _mamba(self, prefix: str, origin: str | None) -> list[TensorPlan]:
        few, many, source = self.few, self.many, origin or ""
        d, big_d = self.source.hidden_size, self.grown.hidden_size

        def plan(name: str, shape: tuple[int, ...], fill: Fill, *patches: Patch) -> TensorPlan:
            return TensorPlan(prefix + name, shape, fill, patches if origin else ())

        def of_heads(name: str, sign: float = 1.0) -> TensorPlan:
            whole = Patch(0, 0, 1, few.n_heads, source + name)
            gains = (whole,) if origin else ()
            return TensorPlan(prefix + name, (many.n_heads,), Fill.GAIN, gains, sign)

        rows, conv, bias = "in_proj.weight", "conv1d.weight", "conv1d.bias"
        norm, out = "norm.weight", "out_proj.weight"
        parts = _segments(few.rows, many.rows)
        mixed = _segments(few.mixed, many.mixed)
        shape = (sum(many.mixed), many.kernel)
        return [
            plan(
                rows,
                (sum(many.rows), big_d),
                Fill.RANDOM,
                *(Patch(to, 0, n, d, source + rows, source_row=at) for at, to, n in parts),
            ),
            plan(
                conv,
                shape if self.for_gguf else (shape[0], 1, shape[1]),
                Fill.RANDOM,
                *(
                    Patch(to, 0, n, many.kernel, source + conv, source_row=at)
                    for at, to, n in mixed
                ),
            ),
            plan(
                bias,
                shape[:1],
                Fill.GAIN,
                *(Patch(0, to, 1, n, source + bias, source_column=at) for at, to, n in mixed),
            ),
            of_heads("A_log", -1.0 if self.for_gguf else 1.0),
            of_heads("D"),
            of_heads("dt_bias"),
            plan(
                norm, (many.n_channels,), Fill.GAIN, Patch(0, 0, 1, few.n_channels, source + norm)
            ),
            plan(
                out,
                (big_d, many.n_channels),
                Fill.ZERO,
                Patch(0, 0, d, few.n_channels, source + out, scale=self.hidden_scale),
            ),
        ]

    def _mlp(self, prefix: str, big_f: int, origin: str | None) -> list[TensorPlan]:
        d, f, big_d = self.source.hidden_size, self.source.intermediate_size, self.grown.hidden_size
        up, down, source = "up_proj.weight", "down_proj.weight", origin or ""
        n_silent = min(big_f, f + -f % _BLOCK) - f
        # Neurons in the source's last block output zero, or they would change its rounding.
        silent = [Patch(f, 0, n_silent, d, scale=0.0)] if n_silent > 0 else []
        columns = [Patch(0, f, d, n_silent, scale=0.0)] if n_silent > 0 else []
        first = Patch(0, 0, f, d, source + up)
        output = Patch(0, 0, d, f, source + down, scale=self.hidden_scale)
        return [
            TensorPlan(
                prefix + up, (big_f, big_d), Fill.RANDOM, (first, *silent) if origin else ()
            ),
            TensorPlan(
                prefix + down, (big_d, big_f), Fill.ZERO, (output, *columns) if origin else ()
            ),
        ]

    def _experts(self, prefix: str, origin: str | None) -> list[TensorPlan]:
        experts, big_d = self.grown.experts, self.grown.hidden_size
        assert experts is not None
        plans = [
            TensorPlan(prefix + "gate.weight", (experts.n, big_d), Fill.RANDOM),
            TensorPlan(prefix + "gate.e_score_correction_bias", (experts.n,), Fill.ZERO),
        ]
        for number in range(experts.n):
            plans += self._mlp(f"{prefix}experts.{number}.", experts.intermediate_size, None)
        return plans + self._mlp(prefix + "shared_experts.", self.grown.intermediate_size, origin)


def _segments(few: tuple[int, ...], many: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return (place in the source, place in the grown model, size) of parts that lie in a row."""
    return [(sum(few[:i]), sum(many[:i]), few[i]) for i in range(len(few))]


def _check_groups(few: Mamba, many: Mamba) -> None:
    """Raise SynthError naming what differs or is too small."""
    if few.n_groups > many.n_groups:
        raise SynthError(
            "a model cannot be grown to less than it has: groups of Mamba-2 heads "
            f"{few.n_groups} > {many.n_groups}"
        )
    for what, ours, theirs in (
        ("heads of a group", few.n_heads / few.n_groups, many.n_heads / many.n_groups),
        ("head dimensions", few.head_dim, many.head_dim),
        ("state sizes", few.state_size, many.state_size),
        ("kernels", few.kernel, many.kernel),
    ):
        if ours != theirs:
            raise SynthError(f"{what} of Mamba-2 layers differ: {ours:g} and {theirs:g}")
