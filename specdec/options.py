"""What a run is loaded with: the keywords of `specdec.load`, validated together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.config import ConfigError, SpecConfig
from specdec.policy import MAX_AUTO_NODES


@dataclass(frozen=True)
class RunOptions:
    """The models and what they may use."""

    model: str | Path
    draft_model: str | Path | None = None
    memory_budget: str | int = "auto"
    ctx_size: int | None = None
    threads: int | None = None
    prefetch_depth: int | None = None
    io_threads: int | None = None
    spec: SpecConfig = SpecConfig()

    @property
    def max_nodes(self) -> int:
        """Most rows that a pass of the target may have."""
        if not self.spec.spec_type:
            return 1
        n_drafted = self.spec.num_draft_tokens
        return 1 + (MAX_AUTO_NODES if n_drafted is None else n_drafted)


def run_options(
    model: str | Path,
    draft_model: str | Path | None = None,
    *,
    memory_budget: str | int = "auto",
    ctx_size: int | None = None,
    spec_type: str | Sequence[str] | None = None,
    num_draft_tokens: int | None = None,
    tree_width: int | None = None,
    draft_depth: int | None = None,
    acceptance: str = "match",
    threads: int | None = None,
    prefetch_depth: int | None = None,
    io_threads: int | None = None,
) -> RunOptions:
    """The options that these keywords mean. Raises ConfigError for contradictions."""
    if spec_type is None:
        spec_type = ("draft", "ngram") if draft_model is not None else ("ngram",)
    spec = SpecConfig(
        spec_type,  # type: ignore[arg-type]  # a name or a list of names is normalised there
        num_draft_tokens,
        tree_width,
        draft_depth,
        acceptance,
    )
    if "draft" in spec.spec_type and draft_model is None:
        raise ConfigError("spec_type has 'draft' but no draft model was named: use -md")
    for name, value in (
        ("ctx_size", ctx_size),
        ("threads", threads),
        ("prefetch_depth", prefetch_depth),
        ("io_threads", io_threads),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1")
    if "draft" not in spec.spec_type:
        draft_model = None  # not loaded where it would not be used
    return RunOptions(
        model, draft_model, memory_budget, ctx_size, threads, prefetch_depth, io_threads, spec
    )
