"""Comparison of the vocabularies of a target and a draft.

The draft reads and proposes token *ids*, so ids must mean the same text in both models. These may
differ: padding rows of the embedding (152064 against 151936 in the Qwen family), the names of added
tokens (reserved slots get names in later releases), and tokens that only the draft has, which the
target's sampler masks. Output is the target's own in every case; with a wrong draft nothing would
be accepted, so it is refused here, with the first difference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from offload.errors import SpecdecError


class VocabularyMismatch(SpecdecError):
    """The draft model cannot propose tokens for this target."""


@dataclass(frozen=True)
class Vocabulary:
    """Meaning of a model's token ids."""

    tokens: tuple[str | None, ...]
    """Token text of each id, as the tokenizer stores it; None where an id has no token."""
    num_tokens: int
    """Rows of the model's embedding: ids from 0 to num_tokens - 1 can be looked up."""
    special: Mapping[str, int | None] = field(default_factory=dict)
    """Role ("bos", "eos", "pad") -> id; None where the model has none."""
    added: Collection[int] = frozenset()
    """Ids that were added to the trained vocabulary: control tokens and reserved slots."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, num_tokens: int) -> Vocabulary:
        """Make a vocabulary from a transformers tokenizer (or an object with its attributes)."""
        by_text: dict[str, int] = tokenizer.get_vocab()
        tokens: list[str | None] = [None] * (max(by_text.values(), default=-1) + 1)
        for text, token_id in by_text.items():
            tokens[token_id] = text
        special = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
        return cls(tuple(tokens), num_tokens, special, frozenset(tokenizer.added_tokens_decoder))


@dataclass(frozen=True)
class Compatibility:
    """The outcome of a comparison."""

    n_target_tokens: int
    n_draft_tokens: int
    n_equal: int
    """Number of ids that mean the same token in both."""
    problem: str | None
    """Reason why the two are incompatible; None when they are compatible."""
    notes: tuple[str, ...] = ()
    """Harmless differences."""

    def lines(self) -> list[str]:
        verdict = "ok: the draft can propose tokens for this target"
        return [
            f"target     {self.n_target_tokens} tokens",
            f"draft      {self.n_draft_tokens} tokens",
            f"equal      {self.n_equal} ids mean the same token",
            *(f"note       {note}" for note in self.notes),
            verdict if self.problem is None else "not compatible",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "compatible": self.problem is None,
            "problem": self.problem,
            "notes": list(self.notes),
            "target_tokens": self.n_target_tokens,
            "draft_tokens": self.n_draft_tokens,
            "equal_tokens": self.n_equal,
        }

    def require_compatible(self) -> None:
        """Raise VocabularyMismatch unless the two are compatible."""
        if self.problem is not None:
            raise VocabularyMismatch(
                f"the draft does not fit the target: {self.problem}; "
                "use a draft with the target's tokenizer, or --spec-type ngram"
            )


def compare_vocabularies(target: Vocabulary, draft: Vocabulary) -> Compatibility:
    """Compare id by id; the first difference that matters becomes the problem."""
    n_common = min(len(target.tokens), len(draft.tokens))
    different = [i for i in range(n_common) if target.tokens[i] != draft.tokens[i]]
    ordinary = [i for i in different if i not in target.added or i not in draft.added]
    return Compatibility(
        n_target_tokens=len(target.tokens),
        n_draft_tokens=len(draft.tokens),
        n_equal=n_common - len(different),
        problem=_find_problem(target, draft, ordinary),
        notes=tuple(_notes(target, draft, different)),
    )


def _find_problem(target: Vocabulary, draft: Vocabulary, ordinary: list[int]) -> str | None:
    if ordinary:
        return f"{_difference(target, draft, ordinary[0])} ({len(ordinary)} ids differ)"
    # Tokenizers may have more tokens than the model.
    n_emitted = min(len(target.tokens), target.num_tokens)
    if draft.num_tokens < n_emitted:
        return (
            f"the target emits token ids up to {n_emitted - 1}, "
            f"the draft's embedding ends at {draft.num_tokens - 1}"
        )
    return None


def _notes(target: Vocabulary, draft: Vocabulary, different: list[int]) -> list[str]:
    notes = []
    renamed = [i for i in different if i in target.added and i in draft.added]
    if renamed:
        notes.append(f"added {_difference(target, draft, renamed[0])} ({len(renamed)} such ids)")
    extra = len(draft.tokens) - len(target.tokens)
    if extra > 0:
        notes.append(f"{extra} tokens only in the draft: never proposed")
    elif extra < 0:
        notes.append(f"{-extra} tokens only in the target: the draft has no text for them")
    if target.num_tokens != draft.num_tokens:
        notes.append(
            f"embedding rows: {target.num_tokens} in the target, {draft.num_tokens} in the draft"
        )
    for role, token_id in target.special.items():
        if draft.special.get(role) != token_id:
            notes.append(
                f"{role} token: id {token_id} in the target, {draft.special.get(role)} in the draft"
            )
    return notes


def _difference(target: Vocabulary, draft: Vocabulary, token_id: int) -> str:
    return (
        f"token {token_id} is {_show(target.tokens[token_id])} in the target "
        f"and {_show(draft.tokens[token_id])} in the draft"
    )


def _show(token: str | None) -> str:
    return "unused" if token is None else repr(token if len(token) <= 40 else token[:40] + "...")
