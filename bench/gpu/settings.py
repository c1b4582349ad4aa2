"""Settings of the measurements on a GPU, and of a test on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Note = Callable[[str, Any], None]
"""Function (name, value) that saves a part of a section's result."""
SECTIONS = ("machine", "grow", "decode", "three tiers", "peer", "drift", "fp32")


@dataclass(frozen=True)
class Settings:
    """Settings of all sections."""

    device: str
    folder: str
    """Folder of the grown targets."""
    limits: dict[str, float]
    """Maximum seconds of each section."""
    shape: str | None
    """Shape of the large target, from bench.synth.shapes; None: that of the small ones."""
    vram_budget: str
    """VRAM budget of the large target; "smallest" is the planner's minimum."""
    host_budget: str
    """Host budget that holds all layers that are not in VRAM."""
    small_host_budget: str
    """Host budget that does not, so that layers stream from storage."""
    sections: tuple[str, ...] = SECTIONS
    """Sections to run, in this order."""
    source: str = "pair:target"
    draft: str = "pair:draft"
    ctx_size: int = 1024
    plain_tokens: int = 12
    speculative_tokens: int = 160
    seconds_per_run: float = 25.0
    """A run that takes longer is cut short."""
    rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
    chain_tokens: int = 16
    n_curve_passes: int = 8
    peer_tokens: int = 8
    exact_tokens: int = 24
    """Tokens of each fp32 output."""

    @property
    def target(self) -> Path:
        return Path(self.folder) / "target"

    @property
    def small_target(self) -> Path:
        """Path of the source with more layers, in bf16."""
        return Path(self.folder) / "small-bf16"

    @property
    def exact_target(self) -> Path:
        """Path of the source with more layers, in fp32."""
        return Path(self.folder) / "small-fp32"

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Settings:
        values = json.loads(path.read_text(encoding="utf-8"))
        lists = {name: tuple(values[name]) for name in ("rates", "sections")}
        return cls(**{**values, **lists})


def full_settings(device: str, folder: Path) -> Settings:
    """Return settings of a 13B shape, 26 GB; within 9 minutes in all.

    The limits assume writing 26 GB at 0.3 GB/s or more, reading them at 1 GB/s (twice, and half of
    them for three tiers), copies at 40 GB/s and reads at 1.5 GB/s. The plan copies 21 GB in a pass,
    and with 12 GiB reads 13 GB of them. Slower machines are cut short.
    """
    limits = (25.0, 120.0, 130.0, 110.0, 85.0, 30.0, 35.0)
    return Settings(
        device=device,
        folder=str(folder),
        limits=dict(zip(SECTIONS, limits, strict=True)),
        shape="llama-2-13b",
        vram_budget="8GiB",
        host_budget="24GiB",
        small_host_budget="12GiB",
    )


def tiny_settings(device: str, folder: Path) -> Settings:
    """Return settings of the embedded pair: all sections run, but their results mean nothing."""
    return Settings(
        device=device,
        folder=str(folder),
        limits=dict.fromkeys(SECTIONS, 60.0),
        shape=None,
        vram_budget="auto" if device == "cpu" else "smallest",
        host_budget="auto",
        small_host_budget="smallest",
        ctx_size=256,
        plain_tokens=4,
        speculative_tokens=12,
        exact_tokens=6,
        rates=(0.1, 1.0),
        chain_tokens=4,
        n_curve_passes=2,
        peer_tokens=5,
    )
