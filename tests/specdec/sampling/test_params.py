from __future__ import annotations

import dataclasses

import pytest
from generation_configs import generation_config

from offload.errors import SpecdecError
from specdec.checks import ConfigError
from specdec.sampling.params import SamplingParams

BAD_VALUES = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 1e-9),
    ("temperature", "hot"),
    ("temperature", 10**400),  # an integer too large for any float
    ("temperature", True),
    ("top_k", -1),
    ("top_k", 2.5),
    ("top_k", None),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("min_p", 2),
    ("typical_p", 0),
    ("top_h", 1.2),
    ("epsilon_cutoff", 3.0),
    ("eta_cutoff", -1.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 5e-324),  # 0 in float32: logits divided by it are infinite
    ("repetition_penalty", -2.0),
    ("no_repeat_ngram_size", -3),
    ("seed", -1),
    ("seed", 2**64),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", None),
    ("temperature", None),
    ("max_tokens", -5),
    ("max_length", 0),
    ("min_tokens", -1),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", 0),
    ("suppress_tokens", False),
    ("bad_words_ids", 0),
    ("logit_bias", 0),
    ("logit_bias", {1: 10**400}),
    ("ignore_eos", "yes"),
    ("renormalize_logits", 1),
    ("sequence_bias", (((1,), 10**400),)),
    ("suppress_tokens", ("a",)),
    ("bad_words_ids", ((),)),
    ("bad_words_ids", 7),
    ("sequence_bias", (((), 1.0),)),
    ("sequence_bias", (("ab"),)),
    ("eos_token_ids", (2.0,)),
    ("forced_bos_token_id", -2),
    ("exponential_decay_length_penalty", (1,)),
    ("logprobs", -1),
    ("logprobs", 2.5),
    ("n", 0),
    ("n", None),
    ("num_beams", 0),
    ("num_beams", 2.0),
    ("length_penalty", "long"),
    ("length_penalty", 10**400),
    ("length_penalty", float("nan")),
    ("length_penalty", 99.0),
    ("early_stopping", "always"),
    ("early_stopping", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_is_refused_in_one_line(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, SpecdecError)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_names_the_option_the_value_and_the_range() -> None:
    with pytest.raises(ConfigError, match=r"top_p is 1.5, must be a number above 0.0 and at most"):
        SamplingParams(top_p=1.5)


CONFLICTS = [
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"ignore_eos": True, "forced_eos_token_id": 3}, "ignore_eos"),
    ({"n": 2}, "greedy decoding has one result"),
    ({"n": 3, "num_beams": 2, "temperature": 1.0}, "raise num_beams"),
    ({"length_penalty": 0.5}, "num_beams is 1"),
    ({"early_stopping": True}, "num_beams is 1"),
    ({"forced_bos_token_id": 3, "suppress_tokens": [3, 4]}, "suppress_tokens"),
    ({"forced_eos_token_id": [3], "suppress_tokens": [3, 4]}, "suppress_tokens"),
]


@pytest.mark.parametrize(("options", "named"), CONFLICTS)
def test_contradictions_are_named(options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**options)


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        SamplingParams().replace(temprature=1.0)
    with pytest.raises(ConfigError, match="has no option 'xyz'"):
        SamplingParams().replace(xyz=1)


def test_lists_become_tuples_and_single_items_sequences() -> None:
    params = SamplingParams(
        stop="END", stop_token_ids=[1, 2], eos_token_ids=5, bad_words_ids=[[1, 2], [3]],
        sequence_bias={(4, 5): 1}, temperature=1,
    )  # fmt: skip
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.eos_token_ids == (5,)
    assert params.bad_words_ids == ((1, 2), (3,))
    assert params.sequence_bias == (((4, 5), 1.0),)
    assert isinstance(params.temperature, float)
    hash(params)


def test_replace_validates_again() -> None:
    params = SamplingParams(max_tokens=4)
    assert params.replace(max_tokens=9).max_tokens == 9
    with pytest.raises(ConfigError):
        params.replace(max_tokens=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 3  # type: ignore[misc]


def test_stop_tokens_and_limits() -> None:
    params = SamplingParams(stop_token_ids=(7,))
    assert params.resolve_stop_tokens((2, 3)) == {2, 3, 7}
    assert params.replace(ignore_eos=True).resolve_stop_tokens((2, 3)) == {7}
    assert params.replace(eos_token_ids=(9,)).resolve_stop_tokens((2, 3)) == {7, 9}
    assert params.token_limit(100) == 64
    assert params.replace(max_length=120).token_limit(100) == 20


def test_generation_config_round_trip() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=7, top_p=0.9, min_p=0.05, typical_p=0.95, top_h=0.4,
        epsilon_cutoff=0.01, eta_cutoff=0.02, repetition_penalty=1.2, no_repeat_ngram_size=3,
        min_tokens=2, bad_words_ids=((1, 2),), sequence_bias=(((3,), -1.0),),
        suppress_tokens=(4,), begin_suppress_tokens=(5,), forced_bos_token_id=6,
        forced_eos_token_id=(7,), exponential_decay_length_penalty=(3, 1.1),
        remove_invalid_values=True, renormalize_logits=True, stop=("x",), eos_token_ids=(7, 8),
        max_tokens=11,
    )  # fmt: skip
    assert SamplingParams.from_generation_config(generation_config(params)) == params
    greedy = SamplingParams(repetition_penalty=1.2, min_length=5, max_length=50)
    assert SamplingParams.from_generation_config(generation_config(greedy)) == greedy


def test_beams_of_a_generation_config() -> None:
    beams = SamplingParams(num_beams=4, n=2, length_penalty=0.5, early_stopping="never")
    assert SamplingParams.from_generation_config(generation_config(beams)) == beams
    # `generate` ignores these two without beams.
    off = {"length_penalty": 2.0, "early_stopping": True}
    assert SamplingParams.from_generation_config(off) == SamplingParams()
    several = {"num_return_sequences": 3, "do_sample": True}
    assert SamplingParams.from_generation_config(several).n == 3


def test_new_tokens_take_precedence_over_lengths_as_in_generate() -> None:
    both = {"min_new_tokens": 9, "min_length": 60, "max_new_tokens": 20, "max_length": 90}
    params = SamplingParams.from_generation_config(both)
    assert params == SamplingParams(min_tokens=9, max_tokens=20)


def test_generation_config_defaults_are_those_of_generate() -> None:
    """Unset means greedy without do_sample, and top-k 50 at temperature 1 with it."""
    transformers = pytest.importorskip("transformers")
    empty = SamplingParams.from_generation_config(transformers.GenerationConfig())
    assert empty == SamplingParams()
    sampled = SamplingParams.from_generation_config(transformers.GenerationConfig(do_sample=True))
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (1.0, 50, 1.0)


def test_a_checkpoints_generation_config_json_is_read() -> None:
    params = SamplingParams.from_generation_config(
        {
            "_from_model_config": True,
            "bos_token_id": 1,
            "do_sample": True,
            "eos_token_id": [2, 3],
            "max_length": 4096,
            "temperature": 0.6,
            "top_p": 0.9,
            "transformers_version": "5.17.0",
        }
    )
    assert params.eos_token_ids == (2, 3)
    assert params.max_length == 4096
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 50, 0.9)


REFUSED = [
    {"guidance_scale": 1.5},
    {"watermarking_config": {"greenlist_ratio": 0.25}},
    {"force_words_ids": [[1]]},
    {"constraints": [1]},
    {"num_beam_groups": 2},
    {"penalty_alpha": 0.6},
    {"dola_layers": "low"},
    {"num_return_sequences": 3},
    {"encoder_repetition_penalty": 1.2},
    {"token_healing": True},
    {"max_time": 3.0},
    {"assistant_ensemble_weight": 0.5},
    {"do_sample": True, "temperature": 0.0},
    {"an_option_of_tomorrow": 1},
]


@pytest.mark.parametrize("values", REFUSED, ids=lambda values: str(list(values)[-1]))
def test_what_cannot_be_honoured_exactly_is_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match=list(values)[-1]):
        SamplingParams.from_generation_config(values)


def test_refused_options_pass_where_they_are_switched_off() -> None:
    off = {"num_beams": 1, "guidance_scale": 1.0, "num_return_sequences": 1, "use_cache": False}
    assert SamplingParams.from_generation_config(off) == SamplingParams()


def test_every_attribute_of_the_installed_generation_config_has_a_class() -> None:
    """No option of the installed transformers is unknown to us."""
    transformers = pytest.importorskip("transformers")
    from specdec.sampling.hf_config import _IGNORED, _REFUSED, _SPECIAL, SAME_VALUE

    names = {n for n in vars(transformers.GenerationConfig()) if not n.startswith("_")}
    assert names <= {*_IGNORED, *_REFUSED, *SAME_VALUE, *_SPECIAL}
