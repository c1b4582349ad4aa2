"""The options of the command line in groups: what loads a model, and how tokens are chosen.

A command takes a group as one parameter; `specdec.cli.signature.with_options` turns its fields into
the options that typer sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from specdec.cli import options
from specdec.config import MAX_DRAFT_TOKENS, parse_spec_type
from specdec.sampling.params import SamplingParams


def parse_num_draft_tokens(text: str) -> int | None:
    """Parse a count; "auto" -> None."""
    if text == "auto":
        return None
    is_number = text.isascii() and text.isdigit() and len(text) < 10
    if not is_number or int(text) > MAX_DRAFT_TOKENS:
        raise options.OptionError(
            f"--num-draft-tokens is {text!r}, must be auto or a whole number from 0 to "
            f"{MAX_DRAFT_TOKENS}"
        )
    return int(text)


@dataclass(frozen=True)
class TargetOptions:
    """What a target is loaded with: keywords of `specdec.load`."""

    model: options.Model
    memory_budget: options.MemoryBudget = "auto"
    device: options.Device = "cpu"
    vram_budget: options.VramBudget = "auto"
    ctx_size: options.CtxSize = None
    threads: options.Threads = None
    prefetch_depth: options.PrefetchDepth = None
    io_threads: options.IoThreads = None
    load_mode: options.LoadMode = "auto"
    cache_type_k: options.CacheTypeK = None
    cache_type_v: options.CacheTypeV = None

    def __post_init__(self) -> None:
        """Raise SpecdecError for a mistake before anything is started."""
        from specdec.planning.run_options import run_options  # the help does without

        run_options(**self.as_keywords())

    def as_keywords(self) -> dict[str, Any]:
        """The keywords of `specdec.load`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class LoadOptions(TargetOptions):
    """What `specdec.load` is called with."""

    draft_models: options.DraftModel = None
    spec_type: options.SpecType = None
    num_draft_tokens: options.NumDraftTokens = "auto"
    tree_width: options.TreeWidth = None
    acceptance: options.Acceptance = "match"
    accept_threshold: options.AcceptThreshold = None
    draft_ahead: options.DraftAhead = "auto"
    draft_window: options.DraftWindow = None
    draft_device: options.DraftDevice = "auto"

    def __post_init__(self) -> None:
        """Raise SpecdecError for a mistake before anything is started."""
        from specdec.planning.run_options import run_options  # the help does without

        drafts: Sequence[str | None] = self.draft_models or [None]
        for draft_model in drafts:
            run_options(**self.keywords_with(draft_model))

    @property
    def draft_model(self) -> str | None:
        """The draft of a run. Raises OptionError where several were named."""
        drafts = self.draft_models or []
        if len(drafts) > 1:
            raise options.OptionError(
                f"{len(drafts)} draft models were named ({', '.join(drafts)}), but a run uses one: "
                "`specdec check --rank --prompts FILE` measures which one serves best"
            )
        return drafts[0] if drafts else None

    def as_keywords(self) -> dict[str, Any]:
        """The keywords of `specdec.load`; spec_type None means its default, () plain decoding."""
        return self.keywords_with(self.draft_model)

    def keywords_with(self, draft_model: str | None) -> dict[str, Any]:
        """The same with one of the drafts, or none."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["draft_models"]
        if self.spec_type is not None:
            values["spec_type"] = parse_spec_type(self.spec_type)
        values["num_draft_tokens"] = parse_num_draft_tokens(self.num_draft_tokens)
        return {**values, "draft_model": draft_model}


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen; None leaves the default alone."""

    temperature: options.Temperature = None
    top_k: options.TopK = None
    top_p: options.TopP = None
    min_p: options.MinP = None
    repetition_penalty: options.RepetitionPenalty = None
    seed: options.Seed = None
    stop: options.Stop = None

    def __post_init__(self) -> None:
        """Raise SpecdecError for a mistake before a model is loaded."""
        SamplingParams.from_options(self.as_keywords())

    def as_keywords(self) -> dict[str, Any]:
        """Only what was given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["stop"] = tuple(self.stop or ()) or None
        return {name: value for name, value in values.items() if value is not None}
