"""Answers to the schemas of a public test suite, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specdec
from bench.checks import schemas
from bench.options import UsageMistake
from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.sampling.params import SamplingParams

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

SUITE = schemas.read_schemas()
ARRAY = schemas.Schema(3, "array", {"type": "array", "items": {"type": "integer"}})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with specdec.load("pair:target", "pair:draft", ctx_size=1024) as loaded:
        yield loaded


def refusal_of(schema: schemas.Schema) -> str | None:
    try:
        SamplingParams(json_schema=schema.value)
    except ConfigError as error:
        return str(error)
    return None


REFUSALS = {schema: refusal_of(schema) for schema in SUITE}
TAKEN = [schema for schema, refusal in REFUSALS.items() if refusal is None]


def test_two_hundred_schemas_are_taken_and_the_others_refused_in_one_line() -> None:
    assert sum(not schema.is_narrowed for schema in SUITE) == 436
    assert sum(not schema.is_narrowed for schema in TAKEN) >= 200
    for refusal in filter(None, REFUSALS.values()):
        assert refusal.startswith("json_schema cannot be kept to: ")
        assert "\n" not in refusal


@pytest.mark.parametrize(
    ("schema", "narrowed"),
    [
        ({"minimum": 3}, "number"),
        ({"allOf": [True, {"required": ["a"]}]}, "object"),
        ({"anyOf": [{"type": "string"}, {"maxItems": 3}]}, "array"),
        ({"const": 3}, None),
        ({"type": "string", "maxLength": 3}, None),
    ],
)
def test_a_schema_that_lets_other_types_pass_is_asked_for_its_own(
    schema: dict[str, Any], narrowed: str | None
) -> None:
    found = schemas.variants(schemas.Schema(1, "one", schema))
    assert [one.value for one in found[1:]] == ([{**schema, "type": narrowed}] if narrowed else [])


def test_complete_answers_are_valid_and_all_are_plain_decodings(llm: LLM) -> None:
    some = schemas.spread(TAKEN, 40)
    found, refused = schemas.check(llm, some, max_tokens=32)
    assert not refused
    assert len(found) == 2 * len(some)
    assert {one.is_narrowed for one in found} == {False, True}
    assert [one for one in found if not one.is_equal] == []
    assert [one for one in found if one.is_valid is False] == []
    assert sum(one.is_valid is True for one in found) > 60


def test_a_refused_schema_is_counted_apart(llm: LLM) -> None:
    one = schemas.Schema(1, "none", {"not": {}})
    found, refused = schemas.check(llm, [one], max_tokens=4)
    assert found == []
    assert refused == {one: 'json_schema cannot be kept to: Unimplemented keys: ["not"]'}


def test_other_mistakes_are_no_refusals(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="max_tokens"):
        schemas.check(llm, [ARRAY], max_tokens=-1)


class Llm:
    """Gives these texts, the one that is asked for plainly before the other."""

    def __init__(self, plain: str, found: str, finish_reason: str, is_exact: bool = True) -> None:
        self.texts = {False: plain, True: found}
        self.finish_reason = finish_reason
        self.is_exact = is_exact
        self.tokenizer = SimpleNamespace(encode=lambda text: [1], eos_token_ids=(0,))

    def generate(self, prompt: str, speculative: bool = True, **keywords: Any) -> Any:
        text = self.texts[speculative]
        return SimpleNamespace(
            text=text,
            token_ids=list(text),
            finish_reason=self.finish_reason,
            stats=SimpleNamespace(is_exact=self.is_exact),
        )


@pytest.mark.parametrize(
    ("llm", "is_valid", "is_wrong"),
    [
        (Llm("[1]", "[1]", "stop"), True, False),
        (Llm("[1]", "[2]", "stop"), True, True),
        (Llm("[1]", "[2]", "stop", is_exact=False), True, False),
        (Llm("[null]", "[null]", "stop"), False, True),
        (Llm("[1", "[1", "stop"), False, True),
        (Llm("[1", "[1", "length"), None, False),
        (Llm("[1", "[2", "length"), None, True),
    ],
)
def test_what_is_wrong_with_an_answer(llm: Any, is_valid: bool | None, is_wrong: bool) -> None:
    for one in schemas.answers(llm, ARRAY, max_tokens=4):
        assert (one.is_valid, one.is_wrong) == (is_valid, is_wrong)


def test_what_the_judge_cannot_read_is_not_judged() -> None:
    pattern = schemas.Schema(1, "letters", {"pattern": r"^\p{Letter}$"})
    llm: Any = Llm('"a"', '"a"', "stop")
    (one, _) = schemas.answers(llm, pattern, max_tokens=4)
    assert one.is_valid is None
    assert "bad escape" in one.reason
    assert not one.is_wrong


@pytest.mark.parametrize(
    ("factor", "text", "is_valid"),
    [
        (0.0001, "0.0508", True),
        (0.0001, "0.05081", False),
        (1.5, "35884337872129872891250.5", True),
        (1.5, "35884337872129872891251.5", False),
        (0.5, "1e308", True),
        (2, "7", False),
        (2, '"7"', True),
    ],
)
def test_multiples_are_those_of_decimal_numbers(factor: float, text: str, is_valid: bool) -> None:
    schema = schemas.Schema(1, "multiples", {"multipleOf": factor})
    llm: Any = Llm(text, text, "stop")
    assert [one.is_valid for one in schemas.answers(llm, schema, 9)] == [is_valid] * 2


@pytest.mark.parametrize(("text", "code"), [("[1]", 0), ("[null]", 2)])
def test_the_report_comes_before_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    class Loaded(Llm):
        def __enter__(self) -> Loaded:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(specdec, "load", lambda *_, **__: Loaded(text, text, "stop"))
    file = tmp_path / "schemas.jsonl"
    file.write_text(json.dumps({"name": "array", "schema": ARRAY.value}) + "\n")
    argv = ["-m", "target", "--schemas", str(file), "--output-file", str(tmp_path / "told.json")]
    assert schemas.run_app(schemas.app, "schemas", argv) == code
    told = json.loads((tmp_path / "told.json").read_text())
    assert [one["is_valid"] for one in told["answers"]] == [code == 0] * 2


def test_a_line_that_is_no_schema_is_named(tmp_path: Path) -> None:
    file = tmp_path / "schemas.jsonl"
    file.write_text('{"name": "any", "schema": {}}\n{"name": "none"}\n')
    with pytest.raises(UsageMistake, match=r"schemas.jsonl:2 is not"):
        schemas.read_schemas(file)
    with pytest.raises(UsageMistake, match="No such file"):
        schemas.read_schemas(tmp_path / "other")
