"""Report of `specdec analyze`: three kinds of pass of one model on one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any

from backends.shapes.shape import ModelShape
from offload.units import format_bytes
from specdec.analysis.experts import ExpertCache, by_memory
from specdec.analysis.operators import Work, total
from specdec.analysis.roofline import FREE_SLACK, TIERS, OperatorBound, PassBound, TierShares
from specdec.devices.spec import DEFAULT_FORMAT, DeviceSpec
from specdec.metrics.renamed import with_old_names

DECODE, VERIFY, PREFILL = "decode", "verify", "prefill"
PHASES = (DECODE, VERIFY, PREFILL)
_LABELS = {
    "qkv": "QKV projections",
    "attention": "attention QK^T AV",
    "states": "recurrent states",
    "output": "output projection",
    "ffn": "feed-forward",
    "other": "other projections",
    "head": "head",
}
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SMALL_PREFIXES = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_WIDTH = 100


@dataclass(frozen=True)
class Analysis:
    """The roofline of a model."""

    name: str
    """Name of the model, as the user gave it."""
    model: ModelShape
    device: DeviceSpec
    context: int
    placement: TierShares
    decode: PassBound
    """Bound of a pass of one token, shown or not; the limits are computed from it."""
    phases: tuple[tuple[str, PassBound], ...]
    free_tokens: int
    """Number of tokens that one pass verifies in the time of one."""

    @property
    def bandwidth_tokens_per_second(self) -> float:
        """Limit of plain decoding without arithmetic: bytes of a pass by the slowest tier."""
        return 1 / self.decode.bandwidth_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the report in bytes, seconds and FLOPs; shares are from 0 to 1."""
        model, placement = self.model, self.placement
        return {
            "model": self.name,
            "family": model.family,
            "n_layers": len(model.layers),
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "number_formats": list(model.number_formats),
            "multiplied_weights": model.n_weights,
            "weight_bytes": model.weight_bytes,
            "layer_bytes": model.layer_bytes,
            **with_old_names({"non_layer_bytes": model.non_layer_bytes}),
            "kv_bytes_per_token": model.kv_bytes_per_token,
            "ctx_size": self.context,
            "kv_bytes": self.context * model.kv_bytes_per_token,
            "state_bytes": model.state_bytes,
            "notes": list(self._notes()),
            "device": self.device.to_dict(),
            "streamed_bytes_per_pass": placement.streamed_bytes,
            "pcie_bytes_per_pass": placement.linked_bytes,
            "missing_bytes": placement.missing_bytes,
            "experts": None
            if placement.experts is None
            else with_old_names(asdict(placement.experts)),
            "experts_by_memory": [
                with_old_names(asdict(cache)) for cache in self._experts_by_memory()
            ],
            "free_tokens": self.free_tokens,
            "plain_tokens_per_second_limit": 1 / self.decode.seconds,
            "bandwidth_tokens_per_second_limit": self.bandwidth_tokens_per_second,
            "bound_by": self.decode.bound_by,
            "phases": {name: _pass_dict(cost) for name, cost in self.phases},
        }

    def text(self) -> str:
        return "\n".join([*self._heading(), *(_phase_text(*phase) for phase in self.phases)]) + "\n"

    def _heading(self) -> Iterator[str]:
        model, device, placement = self.model, self.device, self.placement
        yield (
            f"model    {self.name} ({model.family}): {len(model.layers)} layers, "
            f"{format_bytes(model.layer_bytes)}; embedding and head "
            f"{format_bytes(model.non_layer_bytes)}; {', '.join(model.number_formats)}"
        )
        yield f"device   {device.name}: {_device_line(device)}"
        if device.from_this_machine:
            names = (name.partition("_")[0] for name in device.from_this_machine)
            yield f"         of this machine: {', '.join(names)}"
        yield (
            f"KV       {format_bytes(model.kv_bytes_per_token)} per token, "
            f"{format_bytes(self.context * model.kv_bytes_per_token)} for {self.context}"
        )
        if model.state_bytes:
            yield f"states   {format_bytes(model.state_bytes)} per sequence, of any length"
        yield f"layers   {_shares_line(placement)}"
        if placement.experts is not None:
            yield f"experts  in {_experts_line(placement.experts)}"
            for cache in self._experts_by_memory():
                yield f"         in {_experts_line(cache)}"
        for note in self._notes():
            yield f"note     {note}"
        yield (
            f"limit    {_format_figure(self.bandwidth_tokens_per_second)} tokens/s plain by "
            f"bandwidth alone, {_format_figure(1 / self.decode.seconds)} with arithmetic; "
            f"bound by {self.decode.bound_by}"
        )
        limit = " or more" if self.free_tokens == self.context else ""
        yield (
            f"free     one pass verifies {_tokens(self.free_tokens)}{limit} in the time of 1 "
            f"(+{FREE_SLACK:.0%})"
        )

    def _experts_by_memory(self) -> tuple[ExpertCache, ...]:
        return by_memory(self.model, self.context) if self.placement.experts is not None else ()

    def _notes(self) -> Iterator[str]:
        yield from self.model.notes
        if self.placement.missing_bytes:
            yield (
                f"embedding, head and KV are {format_bytes(self.placement.missing_bytes)} larger "
                "than the memory: this cannot run; give a shorter -c or more memory"
            )


def _device_line(device: DeviceSpec) -> str:
    parts = [f"storage {_si(device.storage_bytes_per_second, 'B/s')}"]
    size = device.memory_bytes
    if device.pcie_bytes_per_second:
        parts.append(f"host memory {format_bytes(device.memory_bytes)}")
        parts.append(f"PCIe {_si(device.pcie_bytes_per_second, 'B/s')}")
        size = device.vram_bytes
    parts.append(f"memory {format_bytes(size)} at {_si(device.dram_bytes_per_second, 'B/s')}")
    named = dict(device.flops_per_second)
    default = named.pop(DEFAULT_FORMAT, None)
    parts += [f"{_si(speed, 'FLOP/s')} in {name}" for name, speed in named.items()]
    if default is not None:
        parts.append(f"{_si(default, 'FLOP/s')}{' otherwise' if named else ''}")
    return ", ".join(parts)


def _shares_line(placement: TierShares) -> str:
    if not placement.streamed_bytes and not placement.linked_bytes:
        has_all = placement.experts is None or placement.experts.hit_rate == 1
        return "all in memory" if has_all else "all but experts in memory"
    parts = []
    if placement.linked_bytes:
        parts.append(f"{format_bytes(placement.linked_bytes)} cross the link")
    if placement.streamed_bytes:
        parts.append(f"{format_bytes(placement.streamed_bytes)} are read from storage")
    return f"{' and '.join(parts)} in every pass, of {format_bytes(placement.layer_bytes)}"


def _experts_line(experts: ExpertCache) -> str:
    return (
        f"{format_bytes(experts.memory_bytes)} of memory: {format_bytes(experts.stored_bytes)} of "
        f"{format_bytes(experts.n_bytes)}, likely {experts.hit_rate:.0%} of those asked for; "
        f"{format_bytes(int(experts.bytes_per_token))} read for a token"
    )


def _pass_dict(bound: PassBound) -> dict[str, Any]:
    everything = total(operator.work for operator in bound.operators)
    return {
        "n_tokens": bound.n_tokens,
        "ctx_size": bound.context,
        "seconds": bound.seconds,
        "tokens_per_second": bound.n_tokens / bound.seconds,
        "bound_by": bound.bound_by,
        "tier_seconds": {tier: bound.tier_seconds(tier) for tier in TIERS},
        "total": _work_dict(everything),
        "operators": {
            operator.name: _operator_dict(bound, operator) for operator in bound.operators
        },
    }


def _operator_dict(bound: PassBound, operator: OperatorBound) -> dict[str, Any]:
    return {
        **_work_dict(operator.work),
        "tier_seconds": dict(operator.seconds),
        "bound_by": operator.bound_by,
        "share": bound.share(operator),
    }


def _work_dict(work: Work) -> dict[str, Any]:
    counts = {
        "count": work.n_products,
        "flops": work.flops,
        "memory_operations": work.elements,
        "stored_elements": work.stored_elements,
        "bytes": work.n_bytes,
        "stored_bytes": work.stored_bytes,
        "flops_per_memory_operation": work.intensity,
        "flops_per_byte": work.byte_intensity,
    }
    return with_old_names(counts)


def _phase_text(name: str, bound: PassBound) -> str:
    """Render a rich table as plain text, as it may go to a file."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1), show_footer=True)
    everything = total(operator.work for operator in bound.operators)
    footer = (*_cells(everything, bound.seconds), bound.bound_by, "")
    table.add_column("operator", "all", no_wrap=True)
    for heading, sum_cell in zip(_HEADINGS, footer, strict=True):
        table.add_column(heading, sum_cell, justify="right", no_wrap=True)
    for operator in bound.operators:
        cells = _cells(operator.work, operator.min_seconds)
        table.add_row(
            _LABELS[operator.name], *cells, operator.bound_by, f"{bound.share(operator):.1%}"
        )
    out = StringIO()
    Console(file=out, width=_WIDTH, color_system=None).print(table, end="")
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    return "\n".join(["", _phase_line(name, bound), *lines])


_HEADINGS = (
    "count", "FLOP", "mem. ops", "bytes", "FLOP/op", "FLOP/B", "time", "bound by", "share"
)  # fmt: skip


def _cells(work: Work, seconds: float) -> tuple[str, ...]:
    return (
        f"{work.n_products}",
        _si(work.flops),
        _si(work.elements),
        _si(work.n_bytes, "B"),
        _format_figure(work.intensity),
        _format_figure(work.byte_intensity),
        _si(seconds, "s"),
    )


def _phase_line(name: str, bound: PassBound) -> str:
    tiers = ", ".join(
        f"{tier} {_si(bound.tier_seconds(tier), 's')}" for tier in TIERS if bound.tier_seconds(tier)
    )
    return f"{name}: {_tokens(bound.n_tokens)} at context {bound.context}; {tiers}"


def _tokens(n_tokens: int) -> str:
    return "1 token" if n_tokens == 1 else f"{n_tokens} tokens"


def _format_figure(value: float) -> str:
    """Format with three significant digits; large values without an exponent."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _si(value: float, unit: str = "") -> str:
    """Format with three significant digits and a decimal prefix: 1.5e9 -> "1.5 GB/s"."""
    prefixes = _PREFIXES if value >= 1 else _SMALL_PREFIXES
    scale, prefix = next((pair for pair in prefixes if value >= pair[0]), prefixes[-1])
    # 999.7 would be shown as 1e+03.
    text = f"{value / scale:.3g}" if value / scale < 999.5 else f"{value / scale:.0f}"
    return f"{text} {prefix}{unit}".rstrip()
