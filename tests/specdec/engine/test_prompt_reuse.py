"""A prompt that begins like an earlier sequence: exactly the KV of the shared prefix is reused.

Every result is compared with that of a second model, which computes each prompt anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from checkpoints import save_tiny_checkpoint
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from interrupting import interrupted
from tiny_pair import save_model, save_tokenizer

import specdec
from backends.contract.sequence import common_length
from specdec.api import LLM

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
FOLDERS = ("specdec", "backends", "offload")
TEXT = [5, 17, 60, 33, 8, 41, 9, 70, 12, 23, 64, 5, 17, 60, 33, 90]
OPTIONS = {"ctx_size": 96, "num_draft_tokens": 6, "draft_depth": 3}


@pytest.fixture(scope="module", params=["llama", "mistral"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, LLM]]:
    """(a model used again and again, a model that forgets); mistral has a sliding window."""
    target = save_tiny_checkpoint(request.param, tmp_path_factory.mktemp("target"), vocab_size=259)
    save_tokenizer(target)
    draft = save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)
    with specdec.load(target, draft, **OPTIONS) as item, specdec.load(target, **OPTIONS) as other:
        # What is evicted should not depend on how long passes took.
        item.session.models.prefix_cache.seconds = float
        yield item, other


def check(llm: LLM, fresh: LLM, prompt: list[int], **options: object) -> int:
    """Check for equal tokens and probabilities; return how many tokens were reused."""
    options = {"logprobs": True, "max_tokens": 8, "ignore_eos": True, **options}
    result = llm.generate(prompt, **options)
    options["speculative"] = False
    expected = fresh.generate(prompt, cache_prompt=False, **options)
    assert result.token_ids == expected.token_ids
    assert result.logprobs == expected.logprobs  # equal logits, bit for bit
    assert expected.stats.reused_prompt_tokens == 0
    return result.stats.reused_prompt_tokens


prompts = st.builds(
    lambda n, tail: TEXT[:n] + tail,
    st.integers(0, len(TEXT)),
    st.lists(st.sampled_from(TEXT), min_size=1, max_size=4),
)
requests = st.tuples(
    prompts, st.sampled_from([0.0, 1.0]), st.booleans(), st.sampled_from(["end", "cancel"])
)


@pytest.mark.slow_except(1)
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data=st.data(), history=st.lists(requests, min_size=2, max_size=5))
def test_any_history_of_prompts(
    models: tuple[LLM, LLM], data: st.DataObject, history: list[tuple]
) -> None:
    llm, fresh = models
    for prompt, temperature, speculative, end in history:
        options = {"temperature": temperature, "seed": 3, "ignore_eos": True}
        if end == "cancel":
            stream = llm.stream(prompt, speculative=speculative, **options)
            for _ in range(data.draw(st.integers(0, 3))):
                next(stream)
            stream.cancel()
        cached = [
            list(sequence.committed_ids) for sequence in llm.session.models.prefix_cache.cached
        ]
        n_reused = check(llm, fresh, prompt, speculative=speculative, **options)
        assert n_reused == max((common_length(pinned, prompt[:-1]) for pinned in cached), default=0)


@pytest.mark.slow
def test_a_conversation_computes_its_new_words_only(models: tuple[LLM, LLM]) -> None:
    llm, fresh = models
    prompt = [200, *TEXT]
    for slot_turn in range(3):
        n_reused = check(llm, fresh, prompt)
        # All but the last token of the answer, which was emitted and never run.
        assert n_reused == (0 if slot_turn == 0 else len(prompt) - 4)
        prompt += [*fresh.generate(prompt, max_tokens=8, ignore_eos=True).token_ids, 7, 8, 9]


def test_the_draft_keeps_its_own(models: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = models
    assert llm.draft is not None
    llm.generate([201, *TEXT], max_tokens=4)
    runs: list[int] = []
    run = llm.draft.forward

    def noted(batch: Any) -> Any:
        runs.extend(len(item.token_ids) for item in batch if item.parents is None)
        return run(batch)

    monkeypatch.setattr(llm.draft, "forward", noted)
    llm.generate([201, *TEXT, 6, 7], max_tokens=4)
    assert max(runs) <= 2 + 4 + 1  # the first answer's words differ from the new prompt


def test_switched_off(models: tuple[LLM, LLM]) -> None:
    llm, _ = models
    results = [llm.generate(TEXT, max_tokens=4, cache_prompt=on) for on in (True, False, True)]
    assert results[1].stats.reused_prompt_tokens == 0
    assert results[2].stats.reused_prompt_tokens == len(TEXT) - 1
    assert results[0].token_ids == results[1].token_ids == results[2].token_ids


def check_caches(llm: LLM) -> None:
    """Check that cached prefixes can be continued."""
    for sequences in (llm.session.models.prefix_cache, llm.session.models.draft_prefix_cache):
        for sequence in sequences.cached:  # type: ignore[union-attr]
            pinned = list(sequence.committed_ids)
            sequence.prefill([11])
            assert list(sequence.committed_ids) == [*pinned, 11]
            sequence.rollback(len(pinned))


def test_interrupts_anywhere(models: tuple[LLM, LLM]) -> None:
    """After any interrupt, the caches contain exactly the tokens on record."""
    llm, fresh = models
    n_interrupted = 0
    for first in range(1, 100_000, 17):
        then = None if first % 2 else 1 + first % 29
        with interrupted(first, then, FOLDERS) as interrupts:
            llm.generate(TEXT[: 4 + first % 9], max_tokens=4)
        llm.session.engine.call(lambda: check_caches(llm))
        check(llm, fresh, TEXT[: 5 + first % 7], max_tokens=2)
        if not interrupts.places:
            break
        n_interrupted += 1
    assert n_interrupted > 1
