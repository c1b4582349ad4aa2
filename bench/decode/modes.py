"""Decoding modes of a measurement, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bench.options import UsageMistake
from specdec.config import SpecConfig

PLAIN, SPECULATIVE, AUTO = "plain", "speculative", "auto"
"""Modes: without a draft; as loaded; trees of automatic sizes. Other names are fixed sizes."""


@dataclass(frozen=True)
class TreeSize:
    """Fixed tree size: draft tokens and depth; parallel drafting as here, or None: as loaded."""

    n_nodes: int
    depth: int
    draft_ahead: str | None = None

    @property
    def name(self) -> str:
        size = f"{self.n_nodes}x{self.depth}"
        return size if self.draft_ahead is None else f"{size}:{self.draft_ahead}"

    def apply(self, spec: SpecConfig) -> SpecConfig:
        ahead = self.draft_ahead or spec.draft_ahead
        return replace(
            spec, num_draft_tokens=self.n_nodes, draft_depth=self.depth, draft_ahead=ahead
        )


def parse_sizes(text: str) -> tuple[TreeSize, ...]:
    """Parse "8x4,16x8:on": draft tokens x depth, parallel drafting or not. Raises UsageMistake."""
    return tuple(_parse_size(part.strip()) for part in text.split(","))


def _parse_size(text: str) -> TreeSize:
    size, colon, ahead = text.partition(":")
    left, x, right = size.partition("x")
    is_size = x and left.isdigit() and right.isdigit() and int(left) and int(right)
    if not is_size or (colon and ahead not in ("on", "off")):
        raise UsageMistake(
            f"--sizes has {text!r}: give draft tokens x depth, e.g. 8x4,16x8; "
            "16x8:on and 16x8:off draft in parallel or not"
        )
    return TreeSize(int(left), int(right), ahead or None)


def keywords_of(mode: str, spec: SpecConfig) -> dict[str, Any]:
    """Return keywords of `LLM.generate`. spec: the configuration that the model was loaded with."""
    if mode in (PLAIN, SPECULATIVE):
        return {"speculative": mode == SPECULATIVE}
    if mode == AUTO:
        return {"spec": replace(spec, num_draft_tokens=None, draft_depth=None)}
    return {"spec": _parse_size(mode).apply(spec)}
