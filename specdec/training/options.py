"""TrainOptions: what `specdec train-draft` trains, on what, for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.heads.kinds import DFLASH, EAGLE3, MTP
from offload.errors import SpecdecError
from specdec.checks import ConfigError, FieldName
from specdec.option import check_options, option
from specdec.run_options import RunOptions


class TrainError(SpecdecError):
    """A draft cannot be trained, or got worse."""


KINDS = (MTP, EAGLE3, DFLASH)
DATA, TRAINING = "Text", "Training"


@dataclass(frozen=True)
class TrainOptions:
    """Options of a training; `target` has those of the target's passes."""

    target: RunOptions
    out: Path
    draft: str | None = None
    kind: str | None = None
    text: tuple[Path, ...] = ()
    traces: Path | None = None
    max_tokens: int = option(
        200_000,
        "Maximum number of tokens of the text to use: whole files, in random order.",
        DATA,
        at_least=1024,
    )
    length: int = option(512, "Tokens of a training sequence.", DATA, at_least=16, at_most=32_768)
    generate: float = option(
        8.0,
        "Minutes during which the target writes its own continuations of the text, because a draft "
        "has to predict the target's output; 0: none.",
        DATA,
        at_least=0.0,
        metavar="MINUTES",
    )
    minutes: float = option(20.0, "Time limit of the training alone.", TRAINING, above=0.0)
    epochs: float = option(
        4.0, "Number of passes over the text, if the time allows.", TRAINING, above=0.0
    )
    learning_rate: float | None = option(
        None,
        "Highest learning rate.",
        TRAINING,
        above=0.0,
        shown_default="0.25 / the draft's width; five times that for a new head",
    )
    intermediate_size: int | None = option(
        None,
        "Neurons of a new head's layers: fewer make a head that is smaller and trained sooner.",
        TRAINING,
        at_least=1,
        shown_default="as the target's layers",
    )
    head_layers: int | None = option(
        None, "Layers of a new DFlash head.", TRAINING, at_least=1, at_most=64, shown_default="2"
    )
    seed: int = option(
        0, "Seed of the order of the text, and of new weights.", TRAINING, at_least=0
    )

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid or contradictory options."""
        check_options(self)
        if (self.draft is None) == (self.kind is None):
            raise ConfigError(
                "give either a draft to align (--from DRAFT) or a kind of head to train "
                f"(--kind {'|'.join(KINDS)})"
            )
        if self.kind is not None and self.kind not in KINDS:
            raise ConfigError(
                FieldName("kind"), f" is {self.kind!r}, must be one of {', '.join(KINDS)}"
            )
        if self.head_layers is not None and self.kind != DFLASH:
            raise ConfigError(
                FieldName("head_layers"), f" is for new DFlash heads alone (--kind {DFLASH})"
            )
        if self.intermediate_size is not None and self.kind is None:
            raise ConfigError(
                FieldName("intermediate_size"),
                f" is for new heads alone (--kind {'|'.join(KINDS)})",
            )
        if bool(self.text) == (self.traces is not None):
            raise ConfigError(
                "give either text (--text FILE, may be repeated) or the traces of runs "
                "(--traces DIR)"
            )
