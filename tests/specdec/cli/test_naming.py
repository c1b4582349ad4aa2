"""Errors name options as they are typed, and leave everything else as it is."""

from __future__ import annotations

import pytest

from specdec.checks import ConfigError
from specdec.cli.naming import as_options
from specdec.cli.options import OptionError

TYPED = {
    "memory_budget": "--memory-budget",
    "n": "--num-return-sequences",
    "num_beams": "--num-beams",
    "stop": "--stop",
    "grammar": "--grammar rules.lark",
}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("memory_budget: 'x' is none", "--memory-budget: 'x' is none"),
        ("n (num_beams) is 2, raise num_beams", "--num-return-sequences is 2, raise --num-beams"),
        ("stop holds ''", "--stop holds ''"),
        ("grammar cannot be kept to: x", "--grammar rules.lark cannot be kept to: x"),
        ("stop when it is done", "stop when it is done"),
        ("the grammar is wrong", "the grammar is wrong"),
        ("'num_beams' is /tmp/num_beams/x", "'num_beams' is /tmp/num_beams/x"),
        ("num_beams.json is no file", "num_beams.json is no file"),
        ("my_num_beams and num_beams_of are none", "my_num_beams and num_beams_of are none"),
        ("ctx_size is 0", "ctx_size is 0"),
    ],
)
def test_names_of_fields_become_options(message: str, told: str) -> None:
    with pytest.raises(OptionError) as caught, as_options(TYPED):
        raise ConfigError(message)
    assert str(caught.value) == told


def test_other_errors_stay() -> None:
    with pytest.raises(ValueError, match="memory_budget"), as_options(TYPED):
        raise ValueError("memory_budget")
