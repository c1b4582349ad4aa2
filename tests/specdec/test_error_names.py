"""Errors name keywords in a program, and options on the command line."""

from __future__ import annotations

import pytest

import specdec
from offload.errors import SpecdecError, naming_options
from specdec.cli.errors import guard
from specdec.text.prompts import context_note

CASES = {
    "raise --ctx-size": "raise ctx_size",
    "with --ctx-size 512 it is 3 GiB": "with ctx_size=512 it is 3 GiB",
    "give --memory-budget 3.5GiB": "give memory_budget='3.5GiB'",
    "needs --memory-budget 672.5 MiB;": "needs memory_budget='672.5 MiB';",
    "use --load-mode mmap": "use load_mode='mmap'",
    "--spec-type draft,ngram loads it": "spec_type='draft,ngram' loads it",
    "or --spec-type ngram": "or spec_type='ngram'",
    "--cache-type-k q8_0 --cache-type-v q8_0": "cache_type_k='q8_0' cache_type_v='q8_0'",
    "raise --num-return-sequences": "raise n",
    "on the CPU only: use --device cpu": "on the CPU only: use device='cpu'",
    "lower --vram-budget or": "lower vram_budget or",
    "run pip install --no-deps x, or --enforce": "run pip install --no-deps x, or --enforce",
    "a -- b --": "a -- b --",
}


@pytest.mark.parametrize(("message", "expected"), CASES.items())
def test_a_program_reads_keywords(message: str, expected: str) -> None:
    assert str(SpecdecError(message)) == expected
    with naming_options():
        assert str(SpecdecError(message)) == message
    assert str(SpecdecError(message)) == expected


def test_a_prompt_that_is_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    with specdec.load("pair:target", ctx_size=64, threads=1, parallel=1) as llm:
        prompt = [1] * 70
        with pytest.raises(SpecdecError, match=r"of 64 \(ctx_size; the model has \d+\)") as caught:
            llm.generate(prompt)
        assert "raise ctx_size" in str(caught.value)
        assert guard("specdec", lambda: llm.generate(prompt)) == 2
    assert "raise --ctx-size" in capsys.readouterr().err
    assert "raise ctx_size" in context_note(3, 64, 128)


def test_an_option_that_contradicts_another() -> None:
    with pytest.raises(SpecdecError) as caught:
        specdec.load("pair:target", spec_type="draft")
    assert "--" not in str(caught.value)
    assert "give draft_model" in str(caught.value)
