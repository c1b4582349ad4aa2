"""Load options: written once, checked once."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import pytest
import torch

import specdec
from specdec.analysis.analyze import analyze
from specdec.api import GenerateKeywords
from specdec.checks import ConfigError
from specdec.option import options_of
from specdec.planning.keywords import LoadKeywords
from specdec.planning.what_if.other_device import plan_on
from specdec.run_options import RunOptions
from specdec.sampling.keywords import SamplingKeywords
from specdec.sampling.params import SamplingParams


def test_the_keywords_of_load_are_the_fields_and_have_their_types() -> None:
    hints = get_type_hints(RunOptions)
    del hints["model"], hints["draft_model"]
    assert get_type_hints(LoadKeywords) == hints
    assert list(LoadKeywords.__annotations__) == list(hints)


def test_every_field_says_what_it_is() -> None:
    assert list(options_of(RunOptions)) == list(get_type_hints(RunOptions))


@pytest.mark.parametrize("call", [specdec.load, specdec.plan_run, analyze])
def test_an_unknown_keyword_gets_the_nearest_name(call: Any) -> None:
    expected = rf"^{call.__name__}\(\) has no option 'memory_budjet': did you mean 'memory_budget'"
    with pytest.raises(ConfigError, match=expected):
        call("pair:target", memory_budjet="1GiB")
    with pytest.raises(TypeError, match="has no option 'xyzzy'; known: model, "):
        call("pair:target", xyzzy=1)


def test_an_unknown_keyword_of_a_plan_for_another_device() -> None:
    with pytest.raises(ConfigError, match=r"plan_on\(\) has no option 'thread'"):
        plan_on("sata-ssd", "pair:target", thread=1)  # type: ignore[call-arg]


def test_without_a_draft_only_ngrams_draft() -> None:
    assert RunOptions("t").spec.spec_type == ("ngram",)
    assert RunOptions("t", "d").spec.spec_type == ("draft", "ngram")
    assert RunOptions("t", "d").draft == "d"


@pytest.mark.parametrize("switched_off", [{"num_draft_tokens": 0}, {"spec_type": "ngram"}])
def test_a_draft_that_would_not_be_used_is_not_loaded(switched_off: dict[str, Any]) -> None:
    options = RunOptions("t", "d", **switched_off)
    assert options.draft is None
    assert not options.may_leave_out_draft


@pytest.mark.parametrize(
    ("fixed", "is_free"),
    [
        ({}, True),
        ({"tree_width": 2}, True),
        ({"spec_type": "draft"}, False),
        ({"num_draft_tokens": 4}, False),
        ({"acceptance": "block"}, False),
        ({"draft_device": "cpu"}, False),
    ],
)
def test_the_plan_may_leave_out_a_draft_about_which_nothing_was_fixed(
    fixed: dict[str, Any], is_free: bool
) -> None:
    assert RunOptions("t", "d", **fixed).may_leave_out_draft == is_free


def test_the_same_run_without_its_draft() -> None:
    options = RunOptions("t", "d", threads=3, draft_window=64).without_draft()
    assert options == RunOptions("t", threads=3, spec_type=("ngram",))
    assert options.draft is None


def test_keywords_make_the_same_options_again() -> None:
    options = RunOptions("t", "d", memory_budget="3GiB", num_beams=2)
    assert RunOptions(**options.keywords()) == options
    assert options.keywords(("model", "threads")) == {"model": "t", "threads": None}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"spec_type": "draft"},
            "spec_type has 'draft' but no draft model was named: give draft_model (-md)",
        ),
        ({"ctx_size": -1}, "ctx_size is -1, must be an integer at least 0"),
        ({"ctx_size": "x"}, "ctx_size is 'x', must be an integer at least 0"),
        ({"ctx_size": 1.5}, "ctx_size is 1.5, must be an integer at least 0"),
        ({"beam_span": None}, "beam_span is None: leave it out for 64"),
        ({"exact": None}, "exact is None: leave it out for 'auto'"),
        ({"acceptance": None}, "acceptance is None: leave it out for 'match'"),
        ({"beam_span": "four"}, "beam_span is 'four', must be an integer at least 1"),
        ({"io_threads": 65}, "io_threads is 65, must be an integer at least 1 and at most 64"),
        ({"num_beams": 0}, "num_beams is 0, must be an integer at least 1 and at most 1024"),
        ({"load_mode": "fast"}, "load_mode is 'fast', must be one of auto, stream, ram, mmap"),
        ({"device": "tpu"}, "device is 'tpu', must be one of cpu, cuda, auto"),
        ({"cache_type_v": "f8"}, "cache_type_v is 'f8', must be one of f16, bf16, q8_0, q4_0, fp8"),
        ({"memory_budget": 0}, "memory_budget is 0, must be positive: try 2GiB, or auto"),
        ({"vram_budget": "0GB"}, "vram_budget is 0GB, must be positive: try 8GiB, or auto"),
        ({"spec_type": 5}, "spec_type is 5, must be Sequence"),
        ({"spec_type": [1]}, "a name in spec_type is 1, must be str"),
        ({"draft_model": 5}, "draft_model is 5, must be str or Path or None"),
        ({"prompt_cache_dir": 5}, "prompt_cache_dir is 5, must be str or Path or None"),
        ({"prompt_cache_dir": ""}, "prompt_cache_dir is empty: name a folder, or leave it out"),
        ({"prompt_cache_size": "0MB"}, "prompt_cache_size is 0MB, must be positive: try 8GiB"),
        (
            {"memory_budget": "3.5"},
            "memory_budget: '3.5' has no unit; write for example 3.5GiB, 6GB or 4096B",
        ),
        (
            {"vram_budget": "lots"},
            "vram_budget: 'lots' is not a byte count; write for example 3.5GiB, 6GB or 512MB",
        ),
        ({"acceptance": "maybe"}, "acceptance is 'maybe', must be one of match, rejection, block"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunOptions("t", **wrong)
    assert str(caught.value) == message


def test_the_keywords_of_sampling_are_the_fields() -> None:
    assert list(SamplingKeywords.__annotations__) == list(get_type_hints(SamplingParams))


def test_the_keywords_of_generate_are_those_of_stream() -> None:
    parameters = inspect.signature(specdec.LLM.stream).parameters
    own = [name for name, item in parameters.items() if item.kind is item.KEYWORD_ONLY]
    assert set(GenerateKeywords.__annotations__) == {*own, *SamplingKeywords.__annotations__}


@pytest.mark.parametrize("name", ["model", "draft_model"])
def test_a_loaded_model_is_refused_with_what_to_give(name: str) -> None:
    class Loaded(torch.nn.Module):
        name_or_path = "user/repo"

    options = {"model": "pair:target", name: Loaded()}
    expected = f"^{name} is a loaded Loaded: .*; give the folder.* here 'user/repo',"
    with pytest.raises(ConfigError, match=expected):
        RunOptions(**options)
