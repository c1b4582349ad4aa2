"""Permitted tokens depend only on those before, whatever was queried in between."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import PERSON
from tiny_pair import save_tokenizer

from specdec.checks import ConfigError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.constraint import Constraint
from specdec.grammar.state import GrammarState
from specdec.pair import pair_path
from specdec.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

PROMPT = [5, 9, 7]
CONSTRAINTS = [
    Constraint("json_schema", json.dumps(PERSON)),
    Constraint("json_object", '{"type": "object"}'),
    Constraint("regex", "(def|define )+[a-f]{1,3}(return)?"),
    Constraint("grammar", 'start: item ("," item)*\nitem: /[0-9]{1,2}/ | "(" start ")"'),
]


@cache
def words() -> Tokenizer:
    """A vocabulary of 4096 byte-pair tokens: most strings have many tokenizations."""
    return Tokenizer.from_pretrained(pair_path("pair:target"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(words().grammar_tokenizer)


def begin(constraint: Constraint, ends: tuple[int, ...] | None = None) -> GrammarState:
    return compiler().begin(constraint, len(PROMPT), ends or words().eos_token_ids)


def allowed(state: GrammarState, text: list[int]) -> list[int]:
    return np.flatnonzero(state.allowed([*PROMPT, *text], words().n_tokens)).tolist()


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=[item.kind for item in CONSTRAINTS])
@given(data=st.data())
@settings(max_examples=25)
def test_the_mask_does_not_depend_on_the_history(
    constraint: Constraint, data: st.DataObject
) -> None:
    """Move back and forth between random valid and some invalid sequences."""
    moved, sequences = begin(constraint), [[]]
    for _ in range(12):
        text = data.draw(st.sampled_from(sequences))
        mask = allowed(moved, text)
        assert mask == allowed(begin(constraint), text)
        if not mask or data.draw(st.booleans()):
            moved.forced([*PROMPT, *text], 4096)
            moved.allows([*PROMPT, *text], data.draw(st.integers(0, 4095)))
            continue
        sequences.append([*text, data.draw(st.sampled_from(mask))])
        sequences.append([*text, data.draw(st.integers(0, 4095))])


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=[item.kind for item in CONSTRAINTS])
@given(data=st.data())
@settings(max_examples=25)
def test_forced_tokens_are_those_that_alone_may_follow(
    constraint: Constraint, data: st.DataObject
) -> None:
    state, text = begin(constraint), []
    for _ in range(15):
        for i, token in enumerate(forced := state.forced([*PROMPT, *text], 4096)):
            assert allowed(begin(constraint), [*text, *forced[:i]]) == [token]
        if not (mask := allowed(state, text)):
            return
        text.append(data.draw(st.sampled_from(mask)))


def test_the_end_is_forced_if_one_token_ends_a_sequence() -> None:
    (eos,) = words().eos_token_ids
    text = words().encode('{"occupation": "astronomer", "age": 7, "likes": [')
    state = begin(CONSTRAINTS[0])
    whole = [*text, *words().encode("]}")]
    assert state.forced([*PROMPT, *whole], 4096) == [eos]
    assert allowed(state, whole) == [eos]
    assert state.ends_only(state.allowed([*PROMPT, *whole], 4096))
    assert not state.ends_only(state.allowed([*PROMPT, *text], 4096))
    assert allowed(state, [*whole, eos]) == []
    two = begin(CONSTRAINTS[0], (eos, eos + 1))
    assert two.forced([*PROMPT, *whole], 4096) == []
    assert allowed(two, whole) == [eos, eos + 1]


def keeps(schema: dict[str, Any], text: str) -> bool:
    state = begin(Constraint("json_schema", json.dumps(schema)))
    return bool(set(allowed(state, words().encode(text))) & set(words().eos_token_ids))


def test_json_is_written_as_json_dumps_does_unless_the_schema_says_otherwise() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "array"}}
    value = {"a": [1, 2], "b": []}
    loose = '{ "a":[1,\n 2]\n, "b" : [] }'
    assert json.loads(loose) == value
    assert keeps(schema, json.dumps(value))
    assert not keeps(schema, loose)
    own = {**schema, "x-guidance": {}}
    assert keeps(own, json.dumps(value))
    assert keeps(own, loose)


def test_a_fork_diverges() -> None:
    state = begin(CONSTRAINTS[2])
    start = words().encode("def")
    expected = allowed(state, start)
    other = state.fork()
    assert allowed(other, words().encode("define ")) != expected
    assert allowed(state, start) == expected


def test_a_row_may_have_fewer_or_more_tokens_than_the_tokenizer() -> None:
    state = begin(CONSTRAINTS[0])
    assert len(state.allowed(PROMPT, 100)) == 100
    assert not state.allowed(PROMPT, 5000)[4096:].any()
    forced = state.forced(PROMPT, 4096)
    highest = max(forced)
    assert state.forced(PROMPT, highest) == forced[: forced.index(highest)]


def test_a_model_without_an_end_of_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        compiler().begin(CONSTRAINTS[0], 0, ())


def test_a_token_that_the_vocabulary_does_not_have_is_refused(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    small = GrammarCompiler(Tokenizer.from_pretrained(tmp_path).grammar_tokenizer)
    with pytest.raises(ConfigError, match="unknown special token") as caught:
        small.begin(Constraint("grammar", 'start: <|call|> "a"'), 0, (2,))
    assert "\n" not in str(caught.value)
    small.begin(Constraint("grammar", 'start: <s> "a"'), 0, (2,))


NUMBER = {"type": "integer"}
ESCAPES: list[tuple[dict[str, Any], str, bool]] = [
    ({"properties": {"a": NUMBER}}, '{"a": "x"}', False),
    ({"properties": {"a": NUMBER}}, r'{"\u0061": "x"}', False),
    ({"properties": {"a": NUMBER}, "x-guidance": {}}, r'{"\u0061": "x"}', False),
    ({"patternProperties": {"^a": NUMBER}}, r'{"\u0061b": "x"}', False),
    ({"properties": {"a": NUMBER}}, r'{"b\n\"\\": "\t"}', True),
    ({"const": "a\x1b"}, r'"a\u001b"', True),
    ({"type": "string", "pattern": r"^\x1b$"}, r'"\u001b"', True),
    ({"type": "object"}, r'{"\u001b": 1}', True),
]


@pytest.mark.parametrize(("schema", "text", "may_be"), ESCAPES)
def test_a_name_is_no_other_one_in_other_letters(
    schema: dict[str, Any], text: str, may_be: bool
) -> None:
    """A JSON reader takes \\u0061 for the letter a, and its value for that of a property."""
    assert keeps(schema, text) == may_be
