"""`specdec recommend`: which well-known pairs run in a memory budget, and how fast on a device.

Each pair is planned as `specdec plan --on DEVICE` plans it, from outlines of its GGUF files. All
speeds are predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from backends.contract.exactness import EXACT_OFF
from backends.gguf.exactness import ExactRun
from backends.gguf.outline import Q8_0, gguf_outline_bytes, write_gguf_outline
from backends.timing.measure import matrix_formats
from offload.budget import BudgetExceeded, format_up
from offload.formats.outline import mark_outlines
from offload.units import GIB, MIB, format_bytes
from specdec.devices.file import find_device
from specdec.devices.spec import DeviceSpec, complete
from specdec.devices.this_machine import ThisMachine
from specdec.models.opened import SourcePair
from specdec.models.outlines import new_outline_folder
from specdec.planning.memory.planner import HEADROOM_BYTES
from specdec.planning.plan import make_plan
from specdec.planning.run_plan import RunPlan
from specdec.planning.what_if.known_models import PAIRS, SIZES, KnownPair, model_id
from specdec.planning.what_if.other_device import measurements_of
from specdec.run_options import RunOptions

TABLE_DEVICES = ("laptop", "laptop-ddr5")
TABLE_GIB = (8, 16, 32, 64)
"""Devices and memory sizes of the table in README.md."""
BUDGET_SHARE = 0.75
"""Share of a machine's memory in the table: the system and a browser take the rest."""
STAR = "\\*"
"""Mark, in Markdown, of a speed without the draft."""
BASE_BYTES = 73 * MIB
"""Memory of a process with llama.cpp and without a model, as `specdec plan` measured it once. This
process's own depends on the machine and its libraries, and the table must not."""
_RUN = ExactRun(EXACT_OFF, "f16", "f16")
"""No trial of these files: they have no vocabulary to run with."""


@dataclass(frozen=True)
class Recommendation:
    """A pair that fits, with the plan's predictions."""

    target: str
    file_type: str
    draft: str | None
    """None where the plan leaves the draft out, or it should not pay."""
    target_id: str
    """Name of the target's file for -m and `specdec pull`."""
    draft_id: str | None
    download_bytes: int
    """Bytes of both files."""
    streamed_bytes: int
    """Bytes that a pass of one token reads from storage; 0: all in memory."""
    tokens_per_second: float
    smallest_bytes: int
    """Smallest budget that works, with the draft."""


def recommend(
    memory_bytes: int,
    device_name: str = TABLE_DEVICES[0],
    report: Callable[[str], None] = lambda _name: None,
) -> list[Recommendation]:
    """Return the pairs that fit a budget, from the smallest target to the largest.

    Args:
        memory_bytes: memory that a run may take.
        device_name: as `specdec plan --on`; its own memory is not looked at.
        report: called with the name of each target that is planned.

    Raises DeviceError, and CheckpointError where the outlines cannot be written.
    """
    return _Planned(device_name, PAIRS).fitting(memory_bytes, report)


def refusal(memory_bytes: int, device_name: str) -> str:
    """Return what is wrong with a budget that no pair fits, and how much the first one needs."""
    first = replace(PAIRS[0], draft=None)
    smallest = _Planned(device_name, (first,)).smallest(memory_bytes)
    return (
        f"no listed model fits {format_bytes(memory_bytes)}: {first.target} in "
        f"{first.file_type} needs {format_up(smallest)}; raise --memory-budget"
    )


class _Planned:
    """Outlines of the known pairs, planned on one device."""

    def __init__(self, device_name: str, pairs: Sequence[KnownPair]) -> None:
        self.pairs = pairs
        self._device = find_device(device_name)
        self._folder = new_outline_folder("known")
        mark_outlines(self._folder)

    @cached_property
    def _sources(self) -> list[SourcePair]:
        return [self._open(pair) for pair in self.pairs]

    def fitting(
        self, memory_bytes: int, report: Callable[[str], None] = lambda _name: None
    ) -> list[Recommendation]:
        left = memory_bytes - BASE_BYTES - HEADROOM_BYTES
        if left <= 0:
            return []  # before the outlines are written
        items = []
        for pair, source in zip(self.pairs, self._sources, strict=True):
            if source.sources[0].non_layer_bytes < left:  # a plan takes half a second
                report(f"{pair.target}, {pair.file_type}")
                with suppress(BudgetExceeded):
                    items.append(self._plan(pair, source, memory_bytes))
        return items

    def smallest(self, memory_bytes: int) -> int:
        """Return the smallest budget of the first pair, which has to be above `memory_bytes`."""
        try:
            return self._plan(self.pairs[0], self._sources[0], memory_bytes).smallest_bytes
        except BudgetExceeded as error:
            return error.smallest_budget_bytes

    def _open(self, pair: KnownPair) -> SourcePair:
        from backends.contract.source import BackendOptions
        from backends.llama.source import GgufSource

        files = [(pair.target, pair.file_type)]
        files += [(pair.draft, Q8_0)] if pair.draft is not None else []
        paths = []
        for name, file_type in files:
            path = self._folder / f"{name}-{file_type}.gguf"
            if not path.exists():
                write_gguf_outline(path, SIZES[name], file_type)
            paths.append(path)
        target, *drafts = (GgufSource(path, BackendOptions(), _RUN) for path in paths)
        return SourcePair((target, drafts[0] if drafts else None))

    def _plan(self, pair: KnownPair, source: SourcePair, n_bytes: int) -> Recommendation:
        """Plan one pair. Raises BudgetExceeded."""
        target, draft = source.sources
        device = self._completed(source)
        options = RunOptions(target.path, None if draft is None else draft.path)
        measurements = measurements_of(device, self._machine(source), source, None, n_bytes)
        plan = make_plan(
            options,
            source,
            measurements,
            n_bytes,
            "as asked",
            BASE_BYTES,
            uses_statistics=False,
        )
        has_draft = draft is not None and plan.does_draft_pay
        files = [target, draft] if has_draft else [target]
        return Recommendation(
            target=pair.target,
            file_type=pair.file_type,
            draft=pair.draft if has_draft else None,
            target_id=model_id(pair.target, pair.file_type),
            draft_id=model_id(pair.draft, Q8_0) if pair.draft and has_draft else None,
            download_bytes=sum(item.path.stat().st_size for item in files if item is not None),
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


def lines(items: Sequence[Recommendation], memory_bytes: int, device_name: str) -> list[str]:
    """Return the text for a terminal, of one item or more."""
    head = ("model", "format", "draft", "download", "storage/pass", "tokens/s")
    rows = [_row(item) for item in items]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return [
        f"run within {format_bytes(memory_bytes)}, the rest read from storage in every pass; "
        f"speeds predicted for {device_name}, not measured:",
        *text,
        *_names_on_hub(items),
    ]


def _names_on_hub(items: Sequence[Recommendation]) -> list[str]:
    """Return lines with the names that -m, -md and `specdec pull` take, and an example."""
    repositories = {item.target: item.target_id.rpartition(":")[0] for item in items}
    drafts = {item.draft: item.draft_id for item in items if item.draft and item.draft_id}
    named = [*repositories.items(), *drafts.items()]
    width = max(len(name) for name, _ in named)
    shown = max(items, key=lambda item: item.tokens_per_second)
    draft = f" -md {shown.draft_id}" if shown.draft_id else ""
    return [
        "names on the hub, for -m and `specdec pull` with the format behind a colon:",
        *(f"  {name:{width}}  {hub_name}" for name, hub_name in named),
        f"the fastest of them: specdec run -m {shown.target_id}{draft}",
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
    """Return the table of README.md, with a column for each memory size."""
    pairs = _shown_pairs()
    by_size = {size: [_speeds(name, size) for name in TABLE_DEVICES] for size in TABLE_GIB}
    sizes = " | ".join(f"{size} GB" for size in TABLE_GIB)
    rows = [
        f"| model | draft, Q8_0 | disk | {sizes} |",
        "|---|---|---|" + "---|" * len(TABLE_GIB),
    ]
    for pair in pairs:
        n_bytes = gguf_outline_bytes(SIZES[pair.target], pair.file_type)
        n_bytes += 0 if pair.draft is None else gguf_outline_bytes(SIZES[pair.draft], Q8_0)
        cells = [
            " / ".join(speeds.get(pair, "-") for speeds in by_size[size]) for size in TABLE_GIB
        ]
        rows.append(
            f"| {pair.target}, {pair.file_type} | {pair.draft or 'n-grams'} | "
            f"{n_bytes / 1e9:.1f} GB | {' | '.join(cells)} |"
        )
    return "\n".join(rows) + "\n"


def _shown_pairs() -> list[KnownPair]:
    """Return each target in its smaller file type."""
    return [pair for pair in PAIRS if pair.file_type != Q8_0]


def _speeds(device_name: str, memory_gib: int) -> dict[KnownPair, str]:
    """Return tokens per second as text; with a star where the plan leaves the draft out."""
    planned = _Planned(device_name, _shown_pairs())
    items = planned.fitting(int(memory_gib * BUDGET_SHARE * GIB))
    return {
        pair: f"{item.tokens_per_second:.1f}" + ("" if item.draft or not pair.draft else STAR)
        for pair in planned.pairs
        for item in items
        if (item.target, item.file_type) == (pair.target, pair.file_type)
    }


def to_dict(items: Iterable[Recommendation]) -> dict[str, Any]:
    return {"recommendations": [asdict(item) for item in items]}
