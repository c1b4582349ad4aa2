"""Errors name options as typed, and keep all other text."""

from __future__ import annotations

import pickle

import pytest
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
