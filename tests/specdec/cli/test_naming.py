"""Errors name options as they are typed, and leave everything else as it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from command_line import expect_error
from hypothesis import given
from hypothesis import strategies as st

from specdec.checks import ConfigError, FieldName
from specdec.cli.naming import as_options
from specdec.cli.options import OptionError
from specdec.run_options import RunOptions
from specdec.sampling.params import SamplingParams

TYPED = {
    "memory_budget": "--memory-budget",
    "n": "--num-return-sequences",
    "num_beams": "--num-beams",
    "stop": "--stop",
    "grammar": "--grammar rules.lark",
}


@given(st.text() | st.sampled_from(list(TYPED)), st.sampled_from(list(TYPED)))
def test_only_names_of_fields_become_options(value: str, name: str) -> None:
    error = ConfigError("with ", FieldName(name), f" given, {value} is wrong, as is {name}")
    assert str(error) == f"with {name} given, {value} is wrong, as is {name}"
    assert error.fields == (name,)
    with pytest.raises(OptionError) as caught, as_options(TYPED):
        raise error
    assert str(caught.value) == f"with {TYPED[name]} given, {value} is wrong, as is {name}"


def test_a_field_that_is_no_option_keeps_its_name() -> None:
    with pytest.raises(OptionError, match="^ctx_size is 0$"), as_options(TYPED):
        raise ConfigError(FieldName("ctx_size"), " is 0")


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="memory_budget"), as_options(TYPED):
        raise ValueError("memory_budget")


def test_an_error_of_another_process_has_its_fields() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(FieldName("top_p"), " is 2")))  # noqa: S301
    assert (str(error), error.fields) == ("top_p is 2", ("top_p",))


@pytest.mark.parametrize(
    ("kind", "values", "fields"),
    [
        (SamplingParams, {"temperature": -1}, ("temperature",)),
        (SamplingParams, {"top_k": None}, ("top_k",)),
        (SamplingParams, {"logit_bias": {3: 1e9}}, ("logit_bias",)),
        (SamplingParams, {"stop_token_ids": [-1]}, ("stop_token_ids",)),
        (SamplingParams, {"min_tokens": 9, "max_tokens": 3}, ("min_tokens", "max_tokens")),
        (SamplingParams, {"n": 2}, ("n", "num_beams")),
        (RunOptions, {"memory_budget": "lots"}, ("memory_budget",)),
        (RunOptions, {"draft_model": 5}, ("draft_model",)),
        (RunOptions, {"spec_type": [1]}, ("spec_type",)),
        (RunOptions, {"load_mode": "x"}, ("load_mode",)),
    ],
)
def test_an_error_has_its_fields(kind: type, values: dict, fields: tuple[str, ...]) -> None:
    model = {"model": "m"} if kind is RunOptions else {}
    with pytest.raises(ConfigError) as caught:
        kind(**model, **values)
    assert caught.value.fields == fields


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--memory-budget lots", "--memory-budget: 'lots' is not a byte count"),
        ("--vram-budget 0", "--vram-budget: '0' has no unit"),
        ("--memory-budget 0B", "--memory-budget is 0B, must be positive: try 2GiB, or auto"),
        (
            "--spec-type draft",
            "--spec-type has 'draft' but no draft model was named: give --",
        ),
        ("--spec-type x", "--spec-type 'x' is unknown"),
        ("--temperature -1", "--temperature is -1.0, must be 0 (greedy) or from"),
        ("--top-p 0", "--top-p is 0.0, must be a number above 0.0"),
        ("--min-p 2", "--min-p is 2.0, must be a number at least 0.0"),
        ("--seed -1", "--seed is -1, must be an integer"),
        ("--stop=", "--stop holds '', every stop must be a non-empty string"),
        (
            "--num-return-sequences 2",
            "--num-return-sequences is 2, but greedy decoding has one result: set a "
            "temperature or --num-beams",
        ),
        (
            "--num-beams 2 --num-return-sequences 3",
            "--num-return-sequences is 3, but beam search with --num-beams 2 finds no more than",
        ),
        ("--length-penalty 2", "--length-penalty is 2.0, but --num-beams is 1: it ranks beams"),
        ("--early-stopping true", "--early-stopping is True, but --num-beams is 1"),
        (
            "--acceptance block --tree-width 2",
            "--acceptance 'block' verifies one chain, but --tree-width is 2",
        ),
        (
            "--acceptance block --accept-threshold 0.5",
            "--accept-threshold is 0.5, but --acceptance 'block' decides",
        ),
        (
            "--exact on --acceptance block -md x",
            "--exact is 'on', but with --acceptance block the tokens are not plain decoding's",
        ),
        ("-md self:x", "--draft-model is 'self:x': the target drafts for itself"),
        (
            "-md self:window=512 --draft-window 64",
            "self:window=512 names its window already: leave out --draft-window",
        ),
        ("--load-mode x", "--load-mode is 'x', must be one of"),
        ("--cache-type-k x", "--cache-type-k is 'x', must be one of"),
        ("--regex a --grammar {file}", "--regex and --grammar {file} are given, but a text keeps"),
        ("--json-schema {file}", "--json-schema {file} is [1], must be an object"),
    ],
)
def test_the_command_line_names_its_options(
    options: str, told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "num_beams is 1"
    file.write_text("[1]")
    argv = [word.replace("{file}", str(file)) for word in options.split(" ")]
    expected = "error: " + told.replace("{file}", str(file))
    expect_error(capsys, ["run", "-m", "no/such/model", "-p", "x", *argv], expected)


def test_options_that_one_command_has_are_named_as_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    analyze = ["analyze", "-m", "pair:draft", "--phase"]
    expect_error(capsys, [*analyze, "x"], "error: --phase is 'x', must be")
    told = "error: --n-tokens is 2, but decode passes have 1 token: use --phase verify"
    expect_error(capsys, [*analyze, "decode", "-n", "2"], told)
