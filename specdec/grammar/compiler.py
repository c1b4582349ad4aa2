"""GrammarCompiler: the grammars of one loaded model, each compiled once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from specdec.checks import ConfigError
from specdec.grammar.cached import Cached
from specdec.grammar.constraint import Constraint, in_one_line, llguidance
from specdec.grammar.state import GrammarState

logger = logging.getLogger(__name__)
MakeTokenizer = Callable[[tuple[int, ...]], Any]
"""Function from end-of-sequence ids to llguidance's LLTokenizer of the model's vocabulary."""
_MAX_CACHED = 16  # grammars; a server's clients often send the same one
_MAX_LEXER_STATES = 50_000  # of 1 to 2 KB; common grammars have some hundreds


class GrammarCompiler:
    """Compiler that gives every sequence its own state at the start of its grammar.

    Args:
        make_tokenizer: makes llguidance's tokenizer; called once for each set of end-of-sequence
            tokens, because sorting a large vocabulary takes a second.
    """

    def __init__(self, make_tokenizer: MakeTokenizer) -> None:
        self._tokenizer = lru_cache(maxsize=2)(make_tokenizer)
        self._matcher = Cached(self._make_matcher, limit=_MAX_CACHED)

    def begin(
        self, constraint: Constraint, prompt_length: int, end_ids: tuple[int, ...]
    ) -> GrammarState:
        """Return the state before the first token after a prompt of `prompt_length` tokens.

        Raises ConfigError if llguidance cannot follow the constraint, or not with this tokenizer.
        """
        if not end_ids:
            raise constraint.refuse(
                "the model has no end-of-sequence token to end a text with; set eos_token_ids"
            )
        matcher = self._matcher(constraint, end_ids).deep_copy()
        return GrammarState(matcher, constraint, prompt_length, end_ids)

    def _make_matcher(self, constraint: Constraint, end_ids: tuple[int, ...]) -> Any:
        library, grammar = llguidance(constraint.kind), constraint.grammar
        try:
            tokenizer = self._tokenizer(end_ids)
        except ConfigError:
            raise
        except Exception as error:  # whatever an odd vocabulary makes the library raise
            raise constraint.refuse(
                f"llguidance cannot use the model's tokenizer: {error}"
            ) from error
        limits = library.LLParserLimits(
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,  # which would have the text in them
        )
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise constraint.refuse(matcher.get_error())
        for warning in matcher.get_grammar_warnings():
            logger.warning(f"{constraint.kind}: {in_one_line(warning)}")
        return matcher
