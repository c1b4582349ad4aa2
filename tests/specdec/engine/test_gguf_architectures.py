"""Tiny random GGUF files of every architecture: speculative = plain = llama.cpp's own text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from tiny_gguf import save_tiny_architecture
from tiny_gguf_kinds import ARCHITECTURES, RECURRENT, REFUSED

import specdec
from backends.contract.backend import UnsupportedModel
from backends.ggml.library import LlamaModel
from backends.llama.context import CACHE_TYPES
from specdec.sampling.params import SamplingParams

pytestmark = pytest.mark.gguf
PROMPT = [3, 17, 5, 3, 17, 5, 8, 21, 3, 17]
N_TOKENS = 24
GREEDY = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True)
OPTIONS = {"ctx_size": 128, "threads": 1}
RUN = [name for name in ARCHITECTURES if name not in REFUSED]


@pytest.mark.slow_except(4)
@pytest.mark.parametrize("name", RUN)
def test_speculative_is_plain_is_llama_cpp(name: str, tmp_path: Path) -> None:
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    with specdec.load(path, spec_type="none", **OPTIONS) as llm:
        options = llm.target._options
        cache_types = [CACHE_TYPES[x] for x in (options.cache_type_k, options.cache_type_v)]
        plain = llm.generate(PROMPT, GREEDY).token_ids
        assert ("recurrent states" in str(llm.plan.lines())) == (name in RECURRENT)
    with specdec.load(path, spec_type="ngram", num_draft_tokens=6, **OPTIONS) as llm:
        result = llm.generate(PROMPT, GREEDY)
        assert result.token_ids == plain
        assert result.stats.drafted_tokens > 0
        again = llm.generate([*PROMPT, *plain, 9], GREEDY).token_ids
        fresh = llm.generate([*PROMPT, *plain, 9], GREEDY, speculative=False).token_ids
        assert again == fresh
    assert list(plain) == own_text(path, *cache_types)


def own_text(path: Path, type_k: int, type_v: int) -> list[int]:
    """Return llama.cpp's greedy text: the prompt in one batch, then one token after the other."""
    model = LlamaModel(path, "mmap")
    library = model.library
    params = library.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, 1, 1
    params.type_k, params.type_v = type_k, type_v
    context = library.llama_init_from_model(model.handle, params)
    tokens: list[int] = []
    new = PROMPT
    for _ in range(N_TOKENS):
        ids = (library.llama_token * len(new))(*new)
        assert library.llama_decode(context, library.llama_batch_get_one(ids, len(new))) == 0
        row = np.ctypeslib.as_array(
            library.llama_get_logits_ith(context, -1), shape=(model.vocab_size,)
        )
        new = [int(row.argmax())]
        tokens += new
    library.llama_free(context)
    model.close()
    return tokens


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_fails_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=rf"\({name}\).* does not run: ") as caught:
        specdec.load(path)
    assert "\n" not in str(caught.value)
