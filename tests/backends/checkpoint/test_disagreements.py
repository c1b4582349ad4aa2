"""A checkpoint whose config, index and files disagree loads as in transformers.

Where transformers refuses, or leaves a parameter random, specdec refuses and names the tensor.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alone import own
from disagreements import PARTS, Disagreement, Writer
from family_checks import TOLERANCE, scale
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from backends.hf.backend import TorchBackend
from backends.hf.cpu_weights import CpuWeights
from backends.hf.loading import load_hf_model
from offload.errors import SpecdecError

FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2", "gpt-neox", "bloom", "opt")
PROMPT = [3, 17, 5, 60, 41]
_numbers = itertools.count()
writer = cache(Writer)

some = st.lists(st.sampled_from(PARTS), min_size=1, max_size=2, unique=True).map(tuple)
spellings = st.lists(st.sampled_from([0, 1, 2, 0, 1, 2, 3]), min_size=1, max_size=2, unique=True)
one_spelling = st.dictionaries(
    st.sampled_from(["all", *PARTS]), spellings.map(tuple), min_size=1, max_size=1
)
ODDITIES: dict[str, st.SearchStrategy[Any]] = {
    "head": st.sampled_from(["none", "same", "short"]),
    "has_embedding": st.just(False),
    "lost": st.sampled_from(PARTS[2:]),
    "spelling": one_spelling,
    "in_two_shards": some,
    "listed_elsewhere": some,
    "unlisted": some,
    "listed_nowhere": st.just(True),
}


@st.composite
def disagreements(draw: st.DrawFn) -> Disagreement:
    """Draw up to three oddities: with all at once, most checkpoints would be refused."""
    drawn = draw(st.lists(st.sampled_from([*ODDITIES, "spelling"]), max_size=3, unique=True))
    return Disagreement(
        family=draw(st.sampled_from(FAMILIES)),
        is_tied=draw(st.sampled_from([True, True, False])),
        n_shards=draw(st.sampled_from([1, 2, 3])),
        **{name: draw(ODDITIES[name]) for name in drawn},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("odd")


def written(folder: Path, odd: Disagreement) -> Path:
    return writer(odd.family).write(folder / str(next(_numbers)), odd)


def theirs(directory: Path) -> np.ndarray | set[str]:
    """Return transformers' logits or the missing weights; empty if it raises."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError:
        return set()
    if info["missing_keys"]:
        return set(info["missing_keys"])
    with torch.no_grad():
        logits: np.ndarray = model.eval()(torch.tensor([PROMPT])).logits[0, -1].numpy()
    return logits


def ours(directory: Path) -> np.ndarray:
    model = load_hf_model(directory)
    with TorchBackend(model, CpuWeights(model, model.layer_weights, 2)) as backend:
        return own(backend).prefill(PROMPT)


def check(directory: Path) -> bool:
    """Compare both loaders; return whether both loaded it."""
    expected = theirs(directory)
    if isinstance(expected, np.ndarray):
        assert np.abs(ours(directory) - expected).max() <= TOLERANCE * scale(expected)
        return True
    with pytest.raises(SpecdecError) as refusal:
        load_hf_model(directory)
    message = str(refusal.value)
    assert "\n" not in message
    assert not expected or any(name in message for name in expected)
    return False


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(odd=disagreements())
@example(odd=Disagreement())
@example(odd=Disagreement(has_embedding=False))
@example(odd=Disagreement(family="gpt2", spelling={"all": (0, 1)}))
def test_logits_are_those_of_transformers_or_both_refuse(odd: Disagreement, folder: Path) -> None:
    check(written(folder, odd))
