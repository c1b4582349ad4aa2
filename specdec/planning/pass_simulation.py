"""Simulation of a forward pass's duration, for a model whose layers are placed as planned.

Every layer is read, as far as it streams, and multiplied with: the ring of slots is simulated over
their real order and sizes (`offload.placement.simulation`), with this machine's bandwidth and
arithmetic; so are the copies to a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.contract.source import ModelCompute
from offload.placement.placement import Placement
from offload.placement.simulation import LayerWork, Overlap, SimulatedPass, simulate_passes
from specdec.policy.cost_model import MIN_STALL, CostModel

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of tokens that passes are simulated with."""
_GPU_SIZES = (*_SIZES, 256, 512, 1024)
_FEW_TOKENS = 16
_KV_BUFFERS = 2
"""Layers whose cold KV is in memory at a time."""
_MANY_TOKENS = (256, 512)
"""Tokens of passes that use all experts."""
_ABOVE_THE_KNEE = 1.05
"""Ratio to one token's seconds from which a pass counts as bound by its tokens."""


@dataclass(frozen=True)
class PassSimulation:
    """Forward passes of a model with its placement on a machine; a CostModel starts from them."""

    placement: Placement
    compute: ModelCompute
    storage_bytes_per_second: float
    copy_bytes_per_second: float = 0.0
    """Bandwidth from pinned host memory to a GPU's; used where a GPU computes."""
    expert_seconds_per_byte: float = 0.0
    """Extra cost of missing experts beyond the storage's bandwidth: their reads are short, and
    their pages are taken from other experts."""
    kv_read_bytes: tuple[int, ...] = ()
    """Bytes of KV that a pass reads for each layer; () where all of it is in memory."""
    _known: dict[tuple[int, float], SimulatedPass] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def times(self, num_tokens: int, gap_seconds: float = 0.0) -> SimulatedPass:
        """Return a pass in a series of passes with `gap_seconds` of drafting between them."""
        key = (num_tokens, gap_seconds)
        if key not in self._known:
            self._known[key] = self._simulate(num_tokens, gap_seconds)
        return self._known[key]

    @property
    def expert_bytes_per_second(self) -> float:
        """Rate at which missing experts are read."""
        return 1.0 / (1.0 / self.storage_bytes_per_second + self.expert_seconds_per_byte)

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds of a pass that follows the one before it at once."""
        return self.times(num_tokens).seconds

    def cost_model(self) -> CostModel:
        """Return the roofline of passes: reads, and a line through those bound by their tokens.

        It is as good for the policy as the simulated times themselves (docs/policy.md).
        """
        # Without moving layers no reads hide the tokens' arithmetic, and experts' reads are not
        # hidden either, as every token needs some: a line through a few tokens is enough, and one
        # through many for passes that use all experts.
        if not self.placement.n_moving_layers or self.placement.experts is not None:
            few = self.seconds(_FEW_TOKENS)
            resident = _line(1, self.seconds(1), _FEW_TOKENS, few)
            return CostModel(0.0, *resident, self.compute.block_size, self._all_experts(*resident))
        sizes = _GPU_SIZES if self.placement.is_on_device else _SIZES
        seconds = {n: self.seconds(n) for n in sizes}
        floor = seconds[1]
        above = [n for n in sizes if seconds[n] > _ABOVE_THE_KNEE * floor]
        low = min(above, default=sizes[-2])
        low, high = min(low, sizes[-2]), sizes[-1]
        # If reads hide the arithmetic at all sizes, the line is fitted to the arithmetic alone.
        line = seconds if above else {n: self._compute_seconds(n) for n in (low, high)}
        fitted = _line(low, line[low], high, line[high])
        reads, arithmetic = self._bounds()
        return CostModel(reads, *fitted, self.compute.block_size, min_seconds=arithmetic)

    def _bounds(self) -> tuple[float, float]:
        """Return the seconds of a pass of one token, as bound by its reads, and its arithmetic."""
        token_pass = self.times(1)
        if token_pass.stall_seconds > MIN_STALL * token_pass.seconds:
            return token_pass.seconds, token_pass.seconds - token_pass.stall_seconds
        layers = self._layers(1)
        reads = sum(layer.read_seconds for layer in layers)
        reads = max(reads, sum(layer.copy_seconds for layer in layers))
        return min(reads, token_pass.seconds), token_pass.seconds

    def _all_experts(
        self, fixed_seconds: float, seconds_per_token: float
    ) -> tuple[float, float] | None:
        """Return the line through passes that use all experts.

        Reading all, and decoding all of a quantised checkpoint, is part of its fixed seconds. None
        where it is no flatter than the line of few tokens, which is given.
        """
        if self.placement.experts is None:
            return None
        low, high = (self.seconds(num_tokens) for num_tokens in _MANY_TOKENS)
        fixed, slope = _line(_MANY_TOKENS[0], low, _MANY_TOKENS[1], high)
        if slope >= seconds_per_token:
            return None
        # Passes of few tokens keep their line.
        few = fixed_seconds + _FEW_TOKENS * seconds_per_token
        return max(fixed, few - _FEW_TOKENS * slope), slope

    def _simulate(self, num_tokens: int, gap_seconds: float) -> SimulatedPass:
        placement = self.placement
        # Reads and copies do not slow down a GPU's arithmetic.
        factor = 1.0 if placement.is_on_device else self.compute.per_byte.beside_factor(num_tokens)
        return simulate_passes(
            self._layers(num_tokens),
            max(placement.n_slots, _KV_BUFFERS if any(self.kv_read_bytes) else 0),
            placement.n_device_slots,
            non_layer_seconds=self.compute.non_layer_seconds(num_tokens),
            gap_seconds=gap_seconds,
            overlap=Overlap(compute=factor),
        )

    def _layers(self, num_tokens: int) -> list[LayerWork]:
        placement, is_copied = self.placement, self.placement.is_on_device
        moving = 0.0 if is_copied else self.compute.seconds_per_streamed_byte
        seconds = self.compute.per_byte.seconds(num_tokens)
        kv_bytes = self.kv_read_bytes or (0,) * len(placement.layers)
        return [
            LayerWork(
                (layer.slot_bytes + kv_bytes[index]) / self.storage_bytes_per_second,
                seconds * layer.n_bytes
                + moving * layer.slot_bytes
                + self._expert_seconds(index, num_tokens),
                layer.copied_bytes / self.copy_bytes_per_second if is_copied else 0.0,
            )
            for index, layer in enumerate(placement.layers)
        ]

    def _expert_seconds(self, layer: int, num_tokens: int) -> float:
        """Return the seconds of a layer's routed experts: read missing ones, compute all."""
        expert_cache = self.placement.experts
        experts = None if expert_cache is None else expert_cache.layers[layer]
        if expert_cache is None or experts is None:
            return 0.0
        per_byte = self.compute.per_byte.seconds(experts.rows_each(num_tokens))
        missing_seconds = expert_cache.read_bytes(layer, num_tokens) / self.expert_bytes_per_second
        return missing_seconds + per_byte * experts.used_bytes(num_tokens)

    def _compute_seconds(self, num_tokens: int) -> float:
        n_bytes = sum(layer.n_bytes for layer in self.placement.layers)
        return self.compute.per_byte.seconds(num_tokens) * n_bytes + self.compute.non_layer_seconds(
            num_tokens
        )


def _line(n_low: int, low: float, n_high: int, high: float) -> tuple[float, float]:
    """Return (fixed seconds, seconds per token) of the line through two points.

    A steep line is below zero where there are no tokens, and it must be: raised to zero it would be
    above what was measured at the lower point.
    """
    slope = max((high - low) / (n_high - n_low), 1e-12)
    return low - slope * n_low, slope
