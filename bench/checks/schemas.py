"""Answers that keep to JSON schemas: is each complete one valid, and are they plain decoding's?

    python -m bench.checks.schemas -m MODEL -md DRAFT

The schemas are a public test suite's (tests/schemas). Each is answered greedily and sampled, with
the default way to draft and plainly. What is complete is judged by the `jsonschema` package, which
shares nothing with the library that constrains the text. Schemas that specdec refuses are counted
apart. Exits with 2 where an answer is not valid or not equal.

Most of the suite's say nothing of values of other types than their own: `{"minItems": 1}` is
content with any number, and a model may always take the way out. So such a schema is asked for a
second time, narrowed to the type that it speaks of.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench import options
from bench.table import Table, text_of
from offload.errors import SpecdecError
from specdec.checks import ConfigError
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

SUITE = Path(__file__).parents[2] / "tests" / "schemas" / "draft2020-12.jsonl"
"""Of a checkout; what pip installs has no tests."""
GREEDY, SAMPLED = "greedy", "T = 0.7"
_TEMPERATURE = 0.7
_KEYWORDS = {
    "object": "properties required additionalProperties patternProperties propertyNames "
    "minProperties maxProperties dependentRequired dependentSchemas unevaluatedProperties",
    "array": "items prefixItems minItems maxItems contains uniqueItems unevaluatedItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_TYPES = {keyword: kind for kind, words in _KEYWORDS.items() for keyword in words.split()}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class WrongAnswers(SpecdecError):
    """Complete answers that are not what was asked for, or not plain decoding's."""


@dataclass(frozen=True)
class Schema:
    """One of a file; its number is the seed of what is sampled."""

    number: int
    name: str
    value: dict[str, Any] = field(hash=False)
    is_narrowed: bool = False


@dataclass(frozen=True)
class Answer:
    """is_valid: None of one that is cut off, or that `jsonschema` cannot judge: then with a reason.
    is_exact: whether it is promised to be plain decoding's."""

    name: str
    is_narrowed: bool
    kind: str
    text: str
    is_complete: bool
    is_equal: bool
    is_exact: bool
    is_valid: bool | None
    reason: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.is_valid is False or (self.is_exact and not self.is_equal)


def read_schemas(path: Path = SUITE) -> list[Schema]:
    """All variants of a file's. Raises UsageMistake where it cannot be read, or a line is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise options.UsageMistake(f"--schemas {path}: {error}") from None
    schemas: list[Schema] = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            schemas += variants(Schema(number, str(value["name"]), dict(value["schema"])))
        except (ValueError, KeyError, TypeError):
            raise options.UsageMistake(
                f'{path}:{number} is not {{"name": ..., "schema": {{...}}}}'
            ) from None
    return schemas


def variants(schema: Schema) -> list[Schema]:
    """It, and where other types may pass it by what is narrowed to its own."""
    kind = None if "type" in schema.value else _type_spoken_of(schema.value)
    if kind is None:
        return [schema]
    return [schema, replace(schema, value={**schema.value, "type": kind}, is_narrowed=True)]


def _type_spoken_of(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    own = (_TYPES[keyword] for keyword in value if keyword in _TYPES)
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in value.get(key, ())]
    return next(own, None) or next(filter(None, map(_type_spoken_of, parts)), None)


class Digits(float):
    """A number of an answer with all the digits that it has there."""

    def __init__(self, text: str) -> None:
        self.exact = Fraction(text)


def make_judge(schema: dict[str, Any]) -> Callable[[Any], bool]:
    """Whether a value, its floats Digits, is valid. Raises UsageMistake without `jsonschema`."""
    try:
        from jsonschema import Draft202012Validator, ValidationError
        from jsonschema.validators import extend
    except ImportError:
        raise options.UsageMistake(
            "judging answers needs jsonschema: pip install 'specdec[bench]'"
        ) from None

    def multiple_of(judge: Any, factor: float, value: Any, _: Any) -> Iterator[Any]:
        """The package's own divides floats, by which 0.0508 is no multiple of 0.0001."""
        if not judge.is_type(value, "number"):
            return
        exact = value.exact if isinstance(value, Digits) else Fraction(value)
        if exact % Fraction(repr(factor)):
            yield ValidationError(f"{value} is not a multiple of {factor}")

    judge = extend(Draft202012Validator, {"multipleOf": multiple_of})(schema)
    return lambda value: bool(judge.is_valid(value))


def answers(llm: LLM, schema: Schema, max_tokens: int) -> Iterator[Answer]:
    """Of each kind one. Raises ConfigError where the schema is refused."""
    prompt = f"# A value of this JSON schema: {json.dumps(schema.value)}\nvalue = "
    newline = llm.tokenizer.encode("\n")
    # JSON comes in one line, so its end ends the text: few models know when to end a bare number.
    ends = {*llm.tokenizer.eos_token_ids, *(newline if len(newline) == 1 else ())}
    for kind in (GREEDY, SAMPLED):
        keywords: dict[str, Any] = {
            "json_schema": schema.value,
            "max_tokens": max_tokens,
            "eos_token_ids": tuple(sorted(ends)),
        }
        if kind == SAMPLED:
            keywords.update(temperature=_TEMPERATURE, seed=schema.number)
        plain = llm.generate(prompt, speculative=False, **keywords)
        found = llm.generate(prompt, **keywords)
        is_complete = found.finish_reason == "stop"
        is_valid, reason = _judged(schema.value, found.text) if is_complete else (None, "")
        yield Answer(
            schema.name,
            schema.is_narrowed,
            kind,
            found.text,
            is_complete,
            found.token_ids == plain.token_ids and found.finish_reason == plain.finish_reason,
            found.stats.is_exact,
            is_valid,
            reason,
        )


def _judged(schema: dict[str, Any], text: str) -> tuple[bool | None, str]:
    is_valid = make_judge(schema)
    try:
        value = json.loads(text, parse_float=Digits)
    except ValueError as error:
        return False, str(error)
    try:
        return is_valid(value), ""
    except Exception as error:  # what it makes of a schema: its patterns are Python's, say
        return None, f"{type(error).__name__}: {error}"


def check(
    llm: LLM, schemas: Sequence[Schema], max_tokens: int
) -> tuple[list[Answer], dict[Schema, str]]:
    """All answers; and of each refused schema the reason."""
    found: list[Answer] = []
    refused: dict[Schema, str] = {}
    for schema in schemas:
        try:
            some = list(answers(llm, schema, max_tokens))
        except ConfigError as error:
            if not str(error).startswith("json_schema "):
                raise
            refused[schema] = str(error)
            continue
        found += some
        for one in some:
            if one.is_wrong:
                _say(f"{one.name}, {one.kind}: {one.text}: {one.reason or 'wrong'}")
    return found, refused


def table(schemas: Sequence[Schema], found: Sequence[Answer], refused: dict[Schema, str]) -> Table:
    """A row for each kind of answer."""
    rows, about = [], []
    for is_narrowed, name in ((False, "as they are"), (True, "narrowed to a type")):
        n_schemas = sum(one.is_narrowed == is_narrowed for one in schemas)
        n_refused = sum(one.is_narrowed == is_narrowed for one in refused)
        about.append(f"schemas {name}: {n_schemas}, of which {n_refused} are refused")
        for kind in (GREEDY, SAMPLED):
            some = [one for one in found if (one.kind, one.is_narrowed) == (kind, is_narrowed)]
            rows.append((f"{name}, {kind}", *map(str, _counts(some))))
    columns = ("schemas", "answers", "complete", "valid", "not valid", "not judged", "equal")
    return Table("Answers to schemas", columns, tuple(rows), about=tuple(about))


def _counts(some: Sequence[Answer]) -> tuple[int, ...]:
    complete = [one for one in some if one.is_complete]
    return (
        len(some),
        len(complete),
        *(sum(one.is_valid is verdict for one in complete) for verdict in (True, False, None)),
        sum(one.is_equal for one in some),
    )


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str, typer.Option("--memory-budget")] = "auto",
    schemas: Annotated[
        Path, typer.Option("--schemas", help='JSON lines: {"name", "schema"}.')
    ] = SUITE,
    n_schemas: Annotated[
        int | None, typer.Option("--n-schemas", min=1, help="So many, spread over the file.")
    ] = None,
    max_tokens: options.MaxTokens = 128,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size")] = 2048,
    output_file: options.OutputFile = None,
) -> None:
    """Answer schemas, judge the answers and compare them with plain constrained decoding."""
    import specdec

    some = spread(read_schemas(schemas), n_schemas)
    make_judge({})
    options.check_writable("--output-file", output_file)
    with specdec.load(model, draft_model, memory_budget=memory_budget, ctx_size=ctx_size) as llm:
        found, refused = check(llm, some, max_tokens)
    if output_file is not None:
        reasons = [{**asdict(one), "reason": reason} for one, reason in refused.items()]
        told = {"model": model, "answers": [asdict(one) for one in found], "refused": reasons}
        output_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    typer.echo(text_of([table(some, found, refused)]))
    n_wrong = sum(one.is_wrong for one in found)
    if n_wrong:
        raise WrongAnswers(f"{n_wrong} answers are not valid or not equal: please report it")


def spread(schemas: Sequence[Schema], n: int | None) -> list[Schema]:
    """n of them, equally far apart: files keep those of one keyword together."""
    n = min(n or len(schemas), len(schemas))
    return [schemas[i * len(schemas) // n] for i in range(n)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.schemas", sys.argv[1:]))
