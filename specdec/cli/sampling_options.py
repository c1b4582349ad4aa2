"""Options of `specdec run` about beam search and about how many sequences are returned."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from specdec.cli.groups import LoadOptions
from specdec.cli.options import OptionError
from specdec.sampling.params import SamplingParams

_PANEL = "Beams and sequences"
_EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}

NumReturnSequences = Annotated[
    int | None,
    typer.Option(
        "--num-return-sequences",
        min=1,
        help="Sequences to return: of seeds SEED, SEED+1, ..., or the best of the beams.",
        rich_help_panel=_PANEL,
        show_default="1",
    ),
]
NumBeams = Annotated[
    int | None,
    typer.Option(
        "--num-beams",
        min=1,
        help="Above 1: beam search, without drafting; with a temperature, beam-search sampling.",
        rich_help_panel=_PANEL,
        show_default="1",
    ),
]
BeamSpan = Annotated[
    int | None,
    typer.Option(
        "--beam-span",
        min=1,
        help="Tokens that beams may be apart: memory is set aside for so many of each.",
        rich_help_panel=_PANEL,
        show_default="64",
    ),
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        "--length-penalty",
        help="Beams are ranked by log-probability / length^this; above 0 prefers long ones.",
        rich_help_panel=_PANEL,
        show_default="1.0",
    ),
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        "--early-stopping",
        metavar="true|false|never",
        help="When to end a beam search: at num-beams finished ones, by estimate, or surely.",
        rich_help_panel=_PANEL,
        show_default="false",
    ),
]


@dataclass(frozen=True)
class SequenceOptions:
    """None leaves the default alone."""

    num_return_sequences: NumReturnSequences = None
    num_beams: NumBeams = None
    beam_span: BeamSpan = None
    length_penalty: LengthPenalty = None
    early_stopping: EarlyStopping = None

    def __post_init__(self) -> None:
        """Raise OptionError for a mistake before a model is loaded."""
        if self.early_stopping not in (None, *_EARLY_STOPPING):
            raise OptionError(
                f"--early-stopping is {self.early_stopping!r}, must be true, false or never"
            )
        if self.beam_span is not None and not self.uses_beams:
            raise OptionError("--beam-span is given without --num-beams: it is about beams")

    @property
    def uses_beams(self) -> bool:
        return (self.num_beams or 1) > 1

    def sampling_keywords(self) -> dict[str, Any]:
        """For SamplingParams; only what was given."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["beam_span"]
        values["n"] = values.pop("num_return_sequences")
        if self.early_stopping is not None:
            values["early_stopping"] = _EARLY_STOPPING[self.early_stopping]
        return {name: value for name, value in values.items() if value is not None}

    def load_keywords(self, load: LoadOptions) -> dict[str, Any]:
        """What `specdec.load` is told: memory for the beams, and that they do not draft."""
        keywords = load.as_keywords()
        if self.uses_beams:
            _refuse_drafting(load, self.num_beams)
            keywords |= {"spec_type": (), "num_beams": self.num_beams}
        if self.beam_span is not None:
            keywords["beam_span"] = self.beam_span
        return keywords


def check_sampling(keywords: dict[str, Any]) -> None:
    """Raise ConfigError for options of different groups that contradict each other."""
    SamplingParams.from_options(keywords)


def _refuse_drafting(load: LoadOptions, num_beams: int | None) -> None:
    given = {
        "--draft-model": load.draft_model is not None,
        "--spec-type": load.spec_type not in (None, "none"),
        "--num-draft-tokens": load.num_draft_tokens not in ("auto", "0"),
        "--tree-width": load.tree_width is not None,
        "--acceptance": load.acceptance != "match",
        "--accept-threshold": load.accept_threshold is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise OptionError(
                f"--num-beams {num_beams} does not draft: a pass scores all beams; leave {name} out"
            )
