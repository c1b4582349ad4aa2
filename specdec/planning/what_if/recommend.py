"""`specdec recommend`: which well-known pairs fit a memory budget, and how fast a device runs them.

Each pair is planned as `specdec plan --on DEVICE` plans it, from outlines of its GGUF files. All
speeds are predictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from backends.contract.exactness import EXACT_OFF
from backends.gguf.exactness import ExactRun
from backends.gguf.outline import Q4_K_M, Q8_0, gguf_outline_bytes, write_gguf_outline
from backends.timing.measure import matrix_formats
from offload.budget import BudgetExceeded
from offload.formats.outline import mark_outlines
from offload.units import GIB, format_bytes
from specdec.devices.file import find_device
from specdec.devices.spec import DeviceSpec, complete
from specdec.devices.this_machine import ThisMachine
from specdec.models.opened import SourcePair
from specdec.models.outlines import new_outline_folder
from specdec.planning.memory.base import measure_base
from specdec.planning.plan import make_plan
from specdec.planning.run_plan import RunPlan
from specdec.planning.what_if.known_models import PAIRS, SIZES, KnownPair
from specdec.planning.what_if.other_device import measurements_of
from specdec.run_options import RunOptions

TABLE_DEVICES = ("laptop", "laptop-ddr5")
TABLE_GIB = (8, 16, 32, 64)
"""Devices and memory sizes of the table in README.md."""
BUDGET_SHARE = 0.75
"""Share of a machine's memory in the table: the system and a browser take the rest."""
STAR = "\\*"
"""Mark, in Markdown, of a speed without the draft."""
_RUN = ExactRun(EXACT_OFF, "f16", "f16")
"""No trial of these files: they have no vocabulary to run with."""


@dataclass(frozen=True)
class Recommendation:
    """A pair that fits, with the plan's predictions."""

    target: str
    file_type: str
    draft: str | None
    """None where the plan leaves the draft out."""
    download_bytes: int
    """Bytes of both files."""
    streamed_bytes: int
    """Bytes that a pass of one token reads from storage; 0: all in memory."""
    tokens_per_second: float
    smallest_bytes: int
    """Smallest budget that works, with the draft."""


def recommend(memory_bytes: int, device_name: str = TABLE_DEVICES[0]) -> list[Recommendation]:
    """Return the pairs that fit a budget, from the smallest target to the largest.

    Args:
        memory_bytes: memory that a run may take.
        device_name: as `specdec plan --on`; its own memory is not looked at.

    Raises DeviceError, and CheckpointError where the outlines cannot be written.
    """
    return _Planned(device_name, PAIRS).fitting(memory_bytes)


class _Planned:
    """Outlines of the known pairs, planned on one device."""

    def __init__(self, device_name: str, pairs: Sequence[KnownPair]) -> None:
        self.pairs = pairs
        self._device = find_device(device_name)
        self._folder = new_outline_folder("known")
        mark_outlines(self._folder)
        self._base_bytes = measure_base()
        self._sources = [self._open(pair) for pair in pairs]

    def fitting(self, memory_bytes: int) -> list[Recommendation]:
        planned = (
            self._plan(pair, source, memory_bytes)
            for pair, source in zip(self.pairs, self._sources, strict=True)
        )
        return [item for item in planned if item is not None]

    def _open(self, pair: KnownPair) -> SourcePair:
        from backends.contract.source import BackendOptions
        from backends.llama.source import GgufSource

        files = ((pair.target, pair.file_type), (pair.draft, Q8_0))
        paths = []
        for name, file_type in files:
            path = self._folder / f"{name}-{file_type}.gguf"
            if not path.exists():
                write_gguf_outline(path, SIZES[name], file_type)
            paths.append(path)
        target, draft = (GgufSource(path, BackendOptions(), _RUN) for path in paths)
        return SourcePair((target, draft))

    def _plan(self, pair: KnownPair, source: SourcePair, n_bytes: int) -> Recommendation | None:
        target, draft = source.sources
        assert draft is not None, "all pairs have one"
        device = self._completed(source)
        options = RunOptions(target.path, draft.path)
        try:
            measurements = measurements_of(device, self._machine(source), source, None, n_bytes)
            plan = make_plan(options, source, measurements, n_bytes, "as asked", self._base_bytes)
        except BudgetExceeded:
            return None
        n_target, n_draft = (item.path.stat().st_size for item in (target, draft))
        has_draft = plan.draft_placement is not None
        return Recommendation(
            target=pair.target,
            file_type=pair.file_type,
            draft=pair.draft if has_draft else None,
            download_bytes=n_target + (n_draft if has_draft else 0),
            streamed_bytes=_streamed_bytes(plan),
            tokens_per_second=plan.predicted_tokens_per_second,
            smallest_bytes=plan.smallest_budget_bytes,
        )

    def _machine(self, source: SourcePair) -> ThisMachine:
        target = source.sources[0]
        return ThisMachine(target.path, matrix_formats(target.multiplied))

    def _completed(self, source: SourcePair) -> DeviceSpec:
        return complete(self._device, self._machine(source))


def _streamed_bytes(plan: RunPlan) -> int:
    return int(plan.decoding.target.placement.streamed_bytes)


def lines(items: Iterable[Recommendation], memory_bytes: int, device_name: str) -> list[str]:
    """Return the text for a terminal."""
    head = ("model", "format", "draft", "download", "storage/pass", "tokens/s")
    rows = [_row(item) for item in items]
    if not rows:
        return [f"no pair of the table fits {format_bytes(memory_bytes)}: raise --memory-budget"]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return [
        f"within {format_bytes(memory_bytes)}, predicted for {device_name}; not measured:",
        *text,
        "get a GGUF file of the model from the hub; `specdec plan -m user/repo:Q4_K_M` plans it",
    ]


def _row(item: Recommendation) -> tuple[str, ...]:
    moved = format_bytes(item.streamed_bytes) if item.streamed_bytes else "none"
    return (
        item.target,
        item.file_type,
        item.draft or "n-grams",
        format_bytes(item.download_bytes),
        moved,
        f"{item.tokens_per_second:.2f}",
    )


def markdown_table() -> str:
    """Return the table of README.md: the pairs in Q4_K_M, with a column for each memory size."""
    pairs = [pair for pair in PAIRS if pair.file_type == Q4_K_M]
    by_size = {size: [_speeds(name, size) for name in TABLE_DEVICES] for size in TABLE_GIB}
    sizes = " | ".join(f"{size} GB" for size in TABLE_GIB)
    rows = [
        f"| model, Q4_K_M | draft, Q8_0 | disk | {sizes} |",
        "|---|---|---|" + "---|" * len(TABLE_GIB),
    ]
    for pair in pairs:
        n_bytes = sum(
            gguf_outline_bytes(SIZES[name], file_type)
            for name, file_type in ((pair.target, Q4_K_M), (pair.draft, Q8_0))
        )
        cells = [
            " / ".join(speeds.get(pair, "-") for speeds in by_size[size]) for size in TABLE_GIB
        ]
        rows.append(
            f"| {pair.target} | {pair.draft} | {n_bytes / 1e9:.1f} GB | {' | '.join(cells)} |"
        )
    return "\n".join(rows) + "\n"


def _speeds(device_name: str, memory_gib: int) -> dict[KnownPair, str]:
    """Return tokens per second as text; with a star where the plan leaves the draft out."""
    planned = _Planned(device_name, [pair for pair in PAIRS if pair.file_type == Q4_K_M])
    items = planned.fitting(int(memory_gib * BUDGET_SHARE * GIB))
    return {
        pair: f"{item.tokens_per_second:.1f}" + ("" if item.draft else STAR)
        for pair in planned.pairs
        for item in items
        if (item.target, item.file_type) == (pair.target, pair.file_type)
    }


def to_dict(items: Iterable[Recommendation]) -> dict[str, Any]:
    return {"recommendations": [asdict(item) for item in items]}
