"""SpecConfig: the options of speculation; frozen, and validated once, when made.

An error names the option, its value and the accepted values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec.checks import ConfigError, FieldName, check_type
from specdec.option import SPECULATION, check_options, option

SPEC_TYPES = ("draft", "ngram")
CHAIN_RULES = ("rejection", "block")  # these verify one chain that was drawn from the draft
ACCEPTANCE_RULES = ("match", *CHAIN_RULES)
DRAFT_AHEAD_MODES = ("auto", "on", "off")
DEFAULT_TREE_WIDTH = 8
DEFAULT_DRAFT_DEPTH = 32
MAX_DRAFT_TOKENS = 1024
MIN_DRAFT_WINDOW = 16


@dataclass(frozen=True)
class SpecConfig:
    """Options of drafting and acceptance; those that are None are chosen by the policy.

    `acceptance="match"` samples the target's token first and follows it through the tree, so the
    output does not depend on the draft. `"rejection"` is the textbook rule for one sampled chain,
    `"block"` verifies such a chain as a whole. `accept_threshold` makes "match" accept draft tokens
    to which the target gives at least this probability: lossy, and off by default.
    """

    spec_type: tuple[str, ...] = SPEC_TYPES  # () = plain decoding
    num_draft_tokens: int | None = option(  # nodes of a tree, its root not counted
        None,
        "Draft tokens per pass; auto decides at each step, from measured times.",
        SPECULATION,
        metavar="N|auto",
        at_least=0,
        at_most=MAX_DRAFT_TOKENS,
        shown_default="auto",
    )
    tree_width: int | None = option(  # children of one node
        None,
        "Maximum branches below one draft token.",
        SPECULATION,
        at_least=1,
        at_most=MAX_DRAFT_TOKENS,
        shown_default=str(DEFAULT_TREE_WIDTH),
    )
    draft_depth: int | None = option(
        None,
        "Maximum levels of a tree.",
        at_least=1,
        at_most=MAX_DRAFT_TOKENS,
        shown_default=str(DEFAULT_DRAFT_DEPTH),
    )
    acceptance: str = option(
        "match",
        "Rule for accepting draft tokens; the last two are for a single sampled chain.",
        SPECULATION,
        choices=ACCEPTANCE_RULES,
    )
    accept_threshold: float | None = option(  # None is lossless
        None,
        "LOSSY: accept a draft token unless the target gives it less than this probability.",
        SPECULATION,
        metavar="P",
        above=0.0,
        at_most=1.0,
        shown_default="off: the output is the target's own",
    )
    draft_ahead: str = option(  # drawn chains are never drafted ahead
        "auto",
        "Draft during the target's pass; auto does so where the target streams.",
        SPECULATION,
        choices=DRAFT_AHEAD_MODES,
    )
    draft_window: int | None = option(
        None,
        "Recent tokens of a long context that the draft model sees.",
        SPECULATION,
        at_least=MIN_DRAFT_WINDOW,
        shown_default="all of them",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec_type", parse_spec_type(self.spec_type))
        check_options(self)
        if self.draws_chains and (self.tree_width or 1) > 1:
            raise ConfigError(
                FieldName("acceptance"),
                f" {self.acceptance!r} verifies one chain, but ",
                FieldName("tree_width"),
                f" is {self.tree_width}: leave that unset or choose 'match'",
            )
        if self.draws_chains and self.accept_threshold is not None:
            raise ConfigError(
                FieldName("accept_threshold"),
                f" is {self.accept_threshold}, but ",
                FieldName("acceptance"),
                f" {self.acceptance!r} decides by a draft's own probabilities: use ",
                FieldName("accept_threshold"),
                " with 'match'",
            )

    @property
    def draws_chains(self) -> bool:
        """Whether the rule verifies one chain whose tokens were drawn from a known distribution."""
        return self.acceptance in CHAIN_RULES

    @property
    def is_lossless(self) -> bool:
        """Whether the output is distributed like the target's own; always without drafts."""
        return self.accept_threshold is None or not self.drafters

    @property
    def is_plain_decoding(self) -> bool:
        """Whether each token is the one that decoding without drafts would choose.

        The chain rules sample from the same distribution, but with other random numbers.
        """
        return not self.drafters or (self.is_lossless and not self.draws_chains)

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters in use; only the first one, the model if named, if chains are drawn."""
        return self.spec_type[:1] if self.draws_chains else self.spec_type

    def without_draft(self) -> SpecConfig:
        """Return the same options without the draft model."""
        spec_type = tuple(kind for kind in self.spec_type if kind != "draft")
        return replace(self, spec_type=spec_type, draft_window=None)

    @property
    def width(self) -> int:
        return 1 if self.draws_chains else self.tree_width or DEFAULT_TREE_WIDTH

    @property
    def depth(self) -> int:
        return self.draft_depth or DEFAULT_DRAFT_DEPTH


def parse_spec_type(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return a tuple such as ("draft", "ngram") for "draft,ngram" or names; () for None, "none"."""
    names = value.split(",") if isinstance(value, str) else value or ()
    check_type("spec_type", names, Sequence)
    for name in names:
        check_type("spec_type", name, str, part="a name in ")
    names = [name.strip() for name in names]
    if names in ([], ["none"], [""]):
        return ()
    if "none" in names:
        raise ConfigError(FieldName("spec_type"), " none switches drafting off: name it alone")
    for name in names:
        if name not in SPEC_TYPES:
            raise ConfigError(
                FieldName("spec_type"),
                f" {name!r} is unknown: use any of {', '.join(SPEC_TYPES)}, or none",
            )
    return tuple(name for name in SPEC_TYPES if name in names)
