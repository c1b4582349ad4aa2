"""Grammars over the vocabularies of GGUF files: byte pairs, and sentencepiece with its spaces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from schemas import PERSON, conforms

import specdec
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.constraint import Constraint
from specdec.pair import pair_path
from specdec.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")
pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
pytestmark = pytest.mark.gguf

from specdec.text.gguf_tokenizer import GgufTokenizer  # noqa: E402

CONSTRAINT = Constraint("json_schema", json.dumps(PERSON))
NORMAL, UNKNOWN, CONTROL, UNUSED, BYTE = 1, 2, 3, 5, 6  # gguf's TokenType
UNUSED_ID = 3 + 256
PIECES = ["▁", '{"', "occ", "occupation", '":', '▁"', "▁[", "astro", "naut", "▁true", "}", "▁1"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufTokenizer]:
    """Control tokens, bytes, an unused token with a name, pieces, letters."""
    import gguf

    path = tmp_path_factory.mktemp("spm") / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    letters = [chr(code) for code in range(33, 127) if chr(code) not in PIECES]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "true"]
    tokens = [*first, *PIECES, *letters]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, UNUSED]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [NORMAL] * (len(tokens) - len(kinds)))
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufTokenizer(path) as tokenizer:
        yield tokenizer


def random_tokens(tokenizer: GgufTokenizer, seed: int) -> list[int]:
    """Draw permitted tokens uniformly until the end."""
    compiler, rng = GrammarCompiler(tokenizer.grammar_tokenizer), np.random.default_rng(seed)
    state = compiler.begin(CONSTRAINT, 0, tokenizer.eos_token_ids)
    text: list[int] = []
    while not text or text[-1] not in tokenizer.eos_token_ids:
        text.append(int(rng.choice(np.flatnonzero(state.allowed(text, tokenizer.n_tokens)))))
    return text


@pytest.mark.parametrize("seed", range(10))
def test_a_random_text_of_sentencepiece_tokens_conforms(
    sentencepiece: GgufTokenizer, seed: int
) -> None:
    """No token without text occurs: the unused one is named like a permitted word."""
    text = random_tokens(sentencepiece, seed)
    assert UNUSED_ID not in text
    assert conforms(json.loads(sentencepiece.decode(text)), PERSON)


def test_forced_stretches_are_written_as_the_tokenizer_writes_them(
    sentencepiece: GgufTokenizer,
) -> None:
    state = GrammarCompiler(sentencepiece.grammar_tokenizer).begin(CONSTRAINT, 0, (2,))
    forced = state.forced([], sentencepiece.n_tokens)
    assert sentencepiece.decode(forced) == '{"occupation": "astro'
    space, *written = sentencepiece.encode('{"occupation": "astro', add_special_tokens=False)
    assert forced == written[: len(forced)]


def test_a_checkpoint_and_its_gguf_allow_the_same(tmp_path: Path) -> None:
    ours = Tokenizer.from_pretrained(pair_path("pair:target"))
    with GgufTokenizer(pair_path("pair:target.gguf")) as theirs:
        states = [
            GrammarCompiler(item.grammar_tokenizer).begin(CONSTRAINT, 0, ours.eos_token_ids)
            for item in (ours, theirs)
        ]
        text = random_tokens(theirs, seed=3)
        for i in range(len(text)):
            masks = [state.allowed(text[:i], ours.n_tokens) for state in states]
            assert np.array_equal(*masks)
            forced = [state.forced(text[:i], ours.n_tokens) for state in states]
            assert forced[0] == forced[1]


def test_a_gguf_model_keeps_to_it_with_and_without_a_draft() -> None:
    with specdec.load(
        "pair:target.gguf", "pair:draft.gguf", ctx_size=256, num_draft_tokens=12
    ) as llm:
        for sampling in ({}, {"temperature": 1.0, "seed": 2}):
            options = {"json_schema": PERSON, "max_tokens": 120, **sampling}
            plain = llm.generate("person = ", speculative=False, **options)
            actual = llm.generate("person = ", **options)
            assert actual.token_ids == plain.token_ids
            assert conforms(json.loads(actual.text), PERSON)
            assert actual.stats.passes < plain.stats.passes
