"""Ends of an output: the model's tokens, those of a chat turn, reported limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_pair import save_model

import specdec
from specdec.api import LLM
from specdec.sampling.params import SamplingParams
from specdec.text.chat_format import PLAIN, ChatFormat

TALK = [{"role": "user", "content": "hi"}]
PAD, EOS = 0, 2  # in the tokenizer
CONFIG_END, GENERATION_ENDS = 100, (101, 102)
NO_END = 103
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}<pad>\n{% endfor %}<s>"

Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("m"), seed=0, max_position_embeddings=64)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": CONFIG_END}))
    generation = {"eos_token_id": list(GENERATION_ENDS)}
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with specdec.load(folder, spec_type="none", ctx_size=32) as loaded:
        yield loaded


def only(token: int, **more: Any) -> dict[str, Any]:
    return {"logit_bias": ((token, 100.0),), "max_tokens": 3, **more}


@pytest.mark.parametrize("token", [PAD, EOS, CONFIG_END, *GENERATION_ENDS, NO_END])
@pytest.mark.parametrize("is_chat", [True, False])
def test_ends_of_an_output(llm: LLM, token: int, is_chat: bool) -> None:
    """A turn ends by the files or the template; a completion as in transformers."""
    result = llm.generate(TALK if is_chat else "hi", **only(token))
    ends = {PAD, EOS, CONFIG_END, *GENERATION_ENDS} if is_chat else set(GENERATION_ENDS)
    assert result.finish_reason == ("stop" if token in ends else "length")
    assert len(result.token_ids) == (1 if token in ends else 3)


def test_a_caller_may_have_other_ends(llm: LLM) -> None:
    for given in ({"ignore_eos": True}, {"eos_token_ids": (NO_END,)}):
        assert llm.generate(TALK, **only(EOS, **given)).finish_reason == "length"
    assert llm.generate(TALK, **only(NO_END, eos_token_ids=(NO_END,))).finish_reason == "stop"
    # Before so many tokens no end is possible, whichever it is.
    assert len(llm.generate(TALK, **only(EOS, min_tokens=2, max_tokens=2)).token_ids) == 2


def test_the_end_follows_the_chat_format(llm: LLM) -> None:
    own = llm.tokenizer.chat_format
    try:
        for form, end in ((ChatFormat("{{ messages[-1].content }}</s>"), EOS), (PLAIN, None)):
            llm.tokenizer.chat_format = form
            params = llm.session.chat_params(SamplingParams())
            assert (PAD in (params.eos_token_ids or ())) is False
            assert end is None or end in (params.eos_token_ids or ())
            assert params.stop == form.stop
    finally:
        llm.tokenizer.chat_format = own


def test_a_cut_by_the_context_is_reported(llm: LLM, folder: Path) -> None:
    long = only(NO_END, max_tokens=1000)
    prompt = [5, 6, 7]
    output = llm.generate(prompt, **long).outputs[0]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 29)
    assert output.finish_note == (
        "the text was cut where the context of 32 tokens (ctx_size; the model has 64) was full, "
        "3 of them the prompt's: shorten that or raise ctx_size"
    )
    # If another limit cuts it, or it ends by itself, there is no note.
    assert llm.generate(prompt, **only(NO_END, max_tokens=29)).outputs[0].finish_note is None
    assert llm.generate(prompt, **only(GENERATION_ENDS[0], max_tokens=99)).outputs[0].note == {}
    with specdec.load(folder, spec_type="none") as whole:
        note = whole.generate(prompt, **long).outputs[0].finish_note
    assert note is not None
    assert "64 tokens (the model's maximum)" in note
    assert note.endswith("shorten that")
