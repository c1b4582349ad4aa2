"""`specdec run` with beams and several sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Models, expect_error, save_models

from specdec.cli.app import main

SAMPLED = ["-p", "ab", "-n", "6", "--temperature", "0.9", "--seed", "3"]
BEAMS = ["-p", "ab", "-n", "6", "--num-beams", "3"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return save_models(tmp_path_factory.mktemp("models"))


def alone(models: Models, *more: str) -> list[str]:
    return ["run", "-m", str(models.target), "--threads", "1", *more]


def test_json_holds_all_sequences(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    argv = models.run_argv(*SAMPLED, "--num-return-sequences", "3", "--json")
    assert main(argv) == 0
    value = json.loads(capsys.readouterr().out)
    outputs = value["outputs"]
    assert [output["seed"] for output in outputs] == [3, 4, 5]
    assert [output["score"] for output in outputs] == [None] * 3
    assert outputs[0]["text"] == value["text"]
    assert outputs[0]["token_ids"] == value["token_ids"]


def test_sequences_stand_below_headings(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    assert main(models.run_argv(*SAMPLED, "--num-return-sequences", "2")) == 0
    out = capsys.readouterr().out
    assert out.startswith("--- 1 of 2 ---\n")
    assert "\n--- 2 of 2 ---\n" in out


def test_beam_search(capsys: pytest.CaptureFixture[str], models: Models) -> None:
    more = ["--num-return-sequences", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    assert main(alone(models, *BEAMS, *more, "--json")) == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert len(outputs) == 2
    assert outputs[0]["score"] >= outputs[1]["score"]


@pytest.mark.slow
def test_constraints_come_from_files(
    capsys: pytest.CaptureFixture[str], models: Models, tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": [["one", 2]]}\n')
    grammar.write_text('start: "yes" | "no"\n')
    for more, strings in (
        (["--json-schema", str(schema)], ['["one", 2]']),
        (["--grammar", str(grammar)], ["yes", "no"]),
        (["--regex", "(ab){3}"], ["ababab"]),
    ):
        assert main(models.run_argv("-p", "x", "-n", "20", "--json", *more)) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["text"] in strings
        assert value["finish_reason"] == "stop"


def test_a_constraint_is_refused_before_a_model_is_opened(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "objectx"}')
    run = ["run", "-m", "no/such/model", "-p", "x"]
    message = f"error: --json-schema {schema} cannot be kept to: Invalid type: objectx"
    expect_error(capsys, [*run, "--json-schema", str(schema)], message)
    for text, wrong in (("{", "is no JSON: "), ("[1]", "is [1], must be an object")):
        schema.write_text(text)
        message = f"error: --json-schema {schema} {wrong}"
        expect_error(capsys, [*run, "--json-schema", str(schema)], message)
    message = f"error: --grammar {schema} cannot be kept to: "
    expect_error(capsys, [*run, "--grammar", str(schema)], message)
    expect_error(capsys, [*run, "--json-schema", str(tmp_path / "none")], "none")
    expect_error(capsys, [*run, "--regex", "[a"], "error: --regex cannot be kept to")
    expect_error(capsys, [*run, "--regex", "a", "--grammar", str(schema)], "leave the others out")
