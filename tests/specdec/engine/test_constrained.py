"""Constrained output is always valid, and equal to plain constrained decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from generating import RandomDrafter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemas import PERSON, conforms, schemas
from tiny_pair import VOCAB, save_model

import specdec
from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.config import SpecConfig
from specdec.sampling.params import SamplingParams

pytest.importorskip("llguidance")

GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
PROMPT = 'A person: {"occupation": "astronaut", "age": 39, "likes": [true, false]}\nAnother:'
EOS = 2


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    draft = save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
    with specdec.load(target, draft, ctx_size=512, num_draft_tokens=12) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model loaded without a drafter."""
    target = save_model(tmp_path_factory.mktemp("target"), seed=0)
    with specdec.load(target, ctx_size=256, spec_type="none") as loaded:
        yield loaded


SPECS = {
    "tree": SpecConfig(num_draft_tokens=12),
    "chain": SpecConfig(num_draft_tokens=6, tree_width=1),
    "n-grams": SpecConfig(spec_type=("ngram",), num_draft_tokens=12),
    "as many as pay": SpecConfig(),
    "ahead": SpecConfig(num_draft_tokens=12, draft_ahead="on"),
}


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("sampling", [GREEDY, *({**SAMPLED, "seed": i} for i in range(4))])
def test_every_drafter_gives_plain_constrained_decoding(
    llm: LLM, spec: SpecConfig, sampling: dict[str, Any]
) -> None:
    options = {**sampling, "json_schema": PERSON, "max_tokens": 200}
    plain = llm.generate(PROMPT, speculative=False, **options)
    actual = llm.generate(PROMPT, spec=spec, **options)
    assert actual.token_ids == plain.token_ids
    assert actual.finish_reason == "stop"
    assert conforms(json.loads(actual.text), PERSON)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas(), seed=st.integers(0, 1000), is_greedy=st.booleans())
def test_a_whole_answer_always_conforms(
    llm: LLM, schema: dict[str, Any], seed: int, is_greedy: bool
) -> None:
    sampling = GREEDY if is_greedy else {**SAMPLED, "seed": seed}
    options = {**sampling, "json_schema": schema, "max_tokens": 256}
    actual = llm.generate("x", **options)
    assert actual.token_ids == llm.generate("x", speculative=False, **options).token_ids
    if actual.finish_reason == "stop":
        assert conforms(json.loads(actual.text), schema)


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("drafts", [("draft",), ("ngram",)])
def test_the_rules_of_chains_keep_to_it(llm: LLM, acceptance: str, drafts: tuple[str, ...]) -> None:
    spec = SpecConfig(spec_type=drafts, acceptance=acceptance, num_draft_tokens=6)
    for seed in range(4):
        actual = llm.generate(
            PROMPT, spec=spec, json_schema=PERSON, max_tokens=200, temperature=1.0, seed=seed
        )
        assert conforms(json.loads(actual.text), PERSON)


def test_the_lossy_rule_keeps_to_it(llm: LLM) -> None:
    spec = SpecConfig(num_draft_tokens=12, accept_threshold=1e-6)
    for seed in range(4):
        actual = llm.generate(
            PROMPT, spec=spec, json_schema=PERSON, max_tokens=200, temperature=1.0, seed=seed
        )
        assert conforms(json.loads(actual.text), PERSON)


def test_a_drafter_of_ones_own_changes_nothing(llm: LLM) -> None:
    """The drafter's tokens break the grammar nearly always."""
    options: dict[str, Any] = {"json_schema": PERSON, "max_tokens": 200, "temperature": 1.0}
    plain = llm.generate(PROMPT, speculative=False, seed=5, **options)
    actual = llm.generate(PROMPT, drafter=RandomDrafter(VOCAB), seed=5, **options)
    assert actual.token_ids == plain.token_ids


def test_the_targets_distribution_is_masked_before_it_is_cut() -> None:
    """Top-k keeps the two likeliest *digits*, however unlikely they are."""
    from specdec.grammar.compiler import GrammarCompiler
    from specdec.pair import pair_path
    from specdec.sampling.sampler import Sampler
    from specdec.text.tokenizer import Tokenizer

    words = Tokenizer.from_pretrained(pair_path("pair:target"))
    params = SamplingParams(regex="[0-9]", temperature=1.0, top_k=2)
    assert params.constraint is not None
    grammar = GrammarCompiler(words.grammar_tokenizer).begin(
        params.constraint, 1, words.eos_token_ids
    )
    sampler = Sampler(params, n_tokens=4096, prompt_length=1, grammar=grammar)
    logits = np.linspace(9.0, 0.0, 4096, dtype=np.float32)
    p = sampler.probs([7], logits)
    digits = sorted(words.encode(digit)[0] for digit in "0123456789")
    assert np.flatnonzero(p).tolist() == digits[:2]
    gap = float(logits[digits[0]] - logits[digits[1]])
    assert p[digits[0]] / p[digits[1]] == pytest.approx(np.exp(gap))


KEYWORDS: list[tuple[dict[str, Any], str]] = [
    ({"const": {"a": [1, None, "b"]}}, r'\{"a": \[1, null, "b"\]\}'),
    ({"type": "string", "pattern": "^[ab]{2,4}$"}, r'"[ab]{2,4}"'),
    ({"type": "string", "format": "date"}, r'"\d{4}-\d\d-\d\d"'),
    ({"type": "string", "minLength": 2, "maxLength": 3}, r'"([^"\\]|\\.+){2,3}"'),
    ({"type": ["null", "boolean"]}, "null|true|false"),
    ({"oneOf": [{"const": "left"}, {"const": "right"}]}, '"(left|right)"'),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "[345]"),
    ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False}, r"\[.*\]"),
    (
        {"$ref": "#/$defs/two", "$defs": {"two": {"enum": [22, 23]}}},
        "22|23",
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^x[0-9]$": {"type": "null"}},
            "additionalProperties": False,
            "maxProperties": 1,
        },
        r'\{("x\d": null)?\}',
    ),
    ({"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 20}, "10|15|20"),
]


@pytest.mark.slow_except(2)
@pytest.mark.parametrize(("schema", "pattern"), KEYWORDS, ids=[p for _, p in KEYWORDS])
def test_keywords_of_schemas(llm: LLM, schema: dict[str, Any], pattern: str) -> None:
    for sampling in (GREEDY, {"temperature": 1.0, "seed": 3}):
        options = {"json_schema": schema, "max_tokens": 60, **sampling}
        actual = llm.generate("x", **options)
        assert actual.token_ids == llm.generate("x", speculative=False, **options).token_ids
        assert actual.finish_reason == "stop"
        json.loads(actual.text)
        assert re.fullmatch(pattern, actual.text)


def test_a_constraint_is_never_dropped_in_silence() -> None:
    from specdec.sampling.sampler import Sampler

    with pytest.raises(ValueError, match="state was given for regex"):
        Sampler(SamplingParams(regex="a"), n_tokens=9)


def test_every_kind_of_constraint(llm: LLM) -> None:
    assert re.fullmatch("[a-c]{2,5}", llm.generate("x", regex="[a-c]{2,5}").text)
    sums = llm.generate("x", grammar='start: N ("+" N)?\nN: /[1-9]/').text
    assert re.fullmatch(r"[1-9](\+[1-9])?", sums)
    either = llm.generate("x", grammar='root ::= "yes" | "no"').text
    assert either in ("yes", "no")
    assert llm.generate("x", regex="").text == ""


def test_any_object(llm: LLM) -> None:
    for seed in range(5):
        options: dict[str, Any] = {"json_object": True, "temperature": 1.0, "seed": seed}
        actual = llm.generate("x", **options)
        assert actual.token_ids == llm.generate("x", speculative=False, **options).token_ids
        if actual.finish_reason == "stop":
            assert isinstance(json.loads(actual.text), dict)


@pytest.mark.parametrize("n", [1, 5, 17])
def test_a_limit_cuts_the_output(llm: LLM, n: int) -> None:
    whole = llm.generate(PROMPT, json_schema=PERSON, max_tokens=200)
    cut = llm.generate(PROMPT, json_schema=PERSON, max_tokens=n)
    assert cut.token_ids == whole.token_ids[:n]
    assert cut.finish_reason == "length"


def test_a_stop_string_ends_the_output(llm: LLM) -> None:
    actual = llm.generate(PROMPT, json_schema=PERSON, max_tokens=200, stop=", ")
    assert actual.finish_reason == "stop"
    assert actual.text in ('{"occupation": "astronaut"', '{"occupation": "astronomer"')


def test_several_sequences_each_keep_to_it(llm: LLM) -> None:
    options: dict[str, Any] = {"json_schema": PERSON, "max_tokens": 200, "temperature": 1.0}
    outputs = llm.generate(PROMPT, n=3, seed=11, **options).outputs
    for i, output in enumerate(outputs):
        assert conforms(json.loads(output.text), PERSON)
        alone = llm.generate(PROMPT, seed=11 + i, speculative=False, **options)
        assert alone.token_ids == output.token_ids


def test_a_finished_output_ends_whatever_processors_say(llm: LLM) -> None:
    """`min_tokens` bans the end-of-sequence token, the only one permitted here."""
    actual = llm.generate("x", regex="abc", min_tokens=9, max_tokens=20)
    assert actual.text == "abc"
    assert actual.token_ids[-1] == EOS


def test_no_processor_restores_a_forbidden_token(llm: LLM) -> None:
    """remove_invalid_values turns the mask's -inf into a number."""
    options: dict[str, Any] = {"temperature": 2.0, "seed": 1, "remove_invalid_values": True}
    assert llm.generate("x", regex="[ab]{20}", max_tokens=30, **options).finish_reason == "stop"


def test_an_impossible_output_is_an_error_and_no_other_output(llm: LLM) -> None:
    from specdec.sampling.processors import SamplingError

    (letter,) = llm.tokenizer.encode("b")
    with pytest.raises(SamplingError, match="constraints"):
        llm.generate("x", regex="abc", suppress_tokens=[letter])


def test_mistakes_are_found_before_anything_is_computed(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="unknown special token"):
        llm.stream("x", grammar='start: <|call|> "a"')
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        llm.stream("x", regex="abc", eos_token_ids=())


def test_other_tokens_may_end_the_sequence(llm: LLM) -> None:
    actual = llm.generate("x", regex="abc", eos_token_ids=(0,))
    assert (actual.text, actual.token_ids[-1], actual.finish_reason) == ("abc", 0, "stop")


def test_without_drafts_a_pass_yields_one_token(mute: LLM) -> None:
    actual = mute.generate(PROMPT, json_schema=PERSON, max_tokens=200)
    assert conforms(json.loads(actual.text), PERSON)
    assert actual.stats.passes == len(actual.token_ids) - 1


@pytest.mark.parametrize("spec", ["tree", "n-grams"])
def test_forced_stretches_come_many_tokens_a_pass(llm: LLM, spec: str) -> None:
    """The grammar leaves one choice: between two words, in the middle."""
    schema = {"enum": ["a sentence that is forced: yes, as is all the rest of it", "no"]}
    actual = llm.generate("x", spec=SPECS[spec], json_schema=schema, seed=1, temperature=2.0)
    n_steps = -(-len(actual.token_ids) // 13)
    assert actual.stats.passes <= n_steps + 1


def test_no_draft_is_run_for_what_is_forced(llm: LLM) -> None:
    """One run of a level for each step, and that of the prompt."""
    actual = llm.generate("x", regex="a text of which every letter is forced", max_tokens=80)
    assert actual.text == "a text of which every letter is forced"
    assert actual.stats.passes <= 4
    assert actual.stats.draft_runs <= 2 * actual.stats.passes
