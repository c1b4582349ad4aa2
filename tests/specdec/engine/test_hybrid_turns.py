"""Two turns of a chat on a hybrid: the second goes on from the first's recurrent states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_session import always_pay, cost_by_tokens, load
from checkpoints import save_tiny_checkpoint
from tiny_pair import SPECIAL, save_model, save_tokenizer

import specdec
from specdec.api import LLM, GenerationResult

OPTIONS = {"ctx_size": 384, "num_draft_tokens": 6, "draft_depth": 3}
TEMPLATE = (
    "{% set how = messages[0].content[:5] %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'user' or how == 'plain' or how == 'think' %}{{ m.content }}"
    "{% elif how == 'shout' %}{{ m.content | upper }}"
    "{% else %}{{ m.content[:6] }} and so on{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if how == 'think' %}<t>{% endif %}{% endif %}"
)
"""It changes answers, or its generation prompt, as the first message says."""
LETTERS = [len(SPECIAL) + i for i in range(256) if 97 - 33 <= i < 123 - 33]
NEXT = {"role": "user", "content": "And why would that be so?"}


def only_letters(token_ids: Any, scores: Any) -> Any:
    """A logits processor: the text of the answer has the same tokens again."""
    result = scores.clone().fill_(-float("inf"))
    result[:, LETTERS] = scores[:, LETTERS]
    return result


ASKED: dict[str, Any] = {
    "max_tokens": 12,
    "ignore_eos": True,
    "logprobs": True,
    "logits_processors": [only_letters],
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hybrid")
    save_tiny_checkpoint("qwen3.5", directory, vocab_size=259, max_position_embeddings=2048)
    save_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="module")
def llm(target: Path, draft: Path) -> Iterator[LLM]:
    with specdec.load(target, draft, **OPTIONS) as loaded:
        cost_by_tokens(loaded)
        yield loaded


def two_turns(how: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return (first turn, what the second adds to the answer)."""
    return [{"role": "user", "content": f"{how}: what is the answer to everything?"}], [NEXT]


def common_length(a: list[int], b: list[int]) -> int:
    """Return the number of equal first tokens."""
    return int(np.cumprod([x == y for x, y in zip(a, b, strict=False)]).sum())


def second_turn(llm: LLM, first: GenerationResult, how: str) -> list[dict[str, str]]:
    begun, added = two_turns(how)
    return [*begun, {"role": "assistant", "content": first.text}, *added]


def ids_of(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    return list(llm.tokenizer.encode_chat(messages))


EXPECTED_END = {"plain": "answer", "shout": "prompt", "short": "prompt", "think": "before"}
"""How far a second turn reuses the first: to the end of its answer or of its prompt, or to before
the last tokens of its prompt."""


def expected_reuse(llm: LLM, first: GenerationResult, how: str) -> int:
    prompt = ids_of(llm, two_turns(how)[0])
    text = [*prompt, *first.token_ids[:-1]]  # the last token was emitted and never run
    n_common = common_length(text, ids_of(llm, second_turn(llm, first, how)))
    expected = {"answer": len(text), "prompt": len(prompt), "before": len(prompt) - len("<t>")}
    n_expected = expected[EXPECTED_END[how]]
    assert n_expected <= n_common  # so the template is as the case says
    return n_expected


@pytest.mark.parametrize("how", EXPECTED_END)
def test_the_second_turn_computes_its_new_tokens_only(llm: LLM, how: str) -> None:
    first = llm.generate(two_turns(how)[0], **ASKED)
    messages = second_turn(llm, first, how)
    second = llm.generate(messages, **ASKED)
    assert second.stats.reused_prompt_tokens == expected_reuse(llm, first, how)
    alone = llm.generate(messages, cache_prompt=False, speculative=False, **ASKED)
    assert second.token_ids == alone.token_ids
    assert second.logprobs == alone.logprobs


@pytest.mark.parametrize("how", ["plain", "think"])
def test_after_a_restart_with_a_prompt_cache(
    target: Path, tmp_path: Path, llm: LLM, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_pay(monkeypatch)
    with load(target, tmp_path, **OPTIONS) as writer:
        first = writer.generate(two_turns(how)[0], **ASKED)
    messages = second_turn(llm, first, how)
    with load(target, tmp_path, **OPTIONS) as reader:
        second = reader.generate(messages, **ASKED)
    assert second.stats.reused_prompt_tokens == expected_reuse(llm, first, how)
    alone = llm.generate(messages, cache_prompt=False, **ASKED)
    assert second.logprobs == alone.logprobs
