"""Models that are loaded again in the midst of a text, of every kind that a run may have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eagle3_heads import bigram_head, bigram_target, save_specforge
from forced_streaming import force_streaming
from tiny_gguf import save_tiny_architecture
from tiny_gguf_kinds import WITH_HEADS
from tiny_pair import VOCAB, save_model, save_tokenizer

import specdec
from specdec.api import LLM, ModelClosed
from specdec.sampling.params import SamplingParams

PROMPT = [3, 17, 5, 3, 17, 5, 8, 21, 3, 17]
ASKED = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=3)
OPTIONS: dict[str, Any] = {"ctx_size": 128, "threads": 1}
Pair = Callable[[Path], tuple[Any, Any]]


class Again:
    """A logits processor that lets the models be loaded again before the next step, some times."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._at = llm, [13, 20, 30]
        self.num_loads = 0

    def __call__(self, ids: Any, scores: Any) -> Any:
        while self._at and ids.shape[1] >= self._at[0]:
            self._at.pop(0)
            self._llm.session.engine.send(self._load)
        return scores

    def _load(self) -> None:
        session = self._llm.session
        session.load_again(session.models.planned)
        self.num_loads += 1


def with_eagle3(folder: Path) -> tuple[Any, Any]:
    target = bigram_target(folder / "target", VOCAB)
    save_tokenizer(target)
    return target, save_specforge(bigram_head(target, 252), folder / "head")


def with_draft(folder: Path) -> tuple[Any, Any]:
    target = save_model(folder / "target", seed=0)
    return target, save_model(folder / "draft", seed=0, num_hidden_layers=1)


def of_architecture(name: str, draft: str | None) -> Pair:
    return lambda folder: (save_tiny_architecture(name, folder / "model.gguf"), draft)


def with_gguf_draft(folder: Path) -> tuple[Any, Any]:
    target, draft = (save_tiny_architecture("llama", folder / f"{i}.gguf") for i in range(2))
    return target, draft


PAIRS: dict[str, Pair] = {
    "eagle3": with_eagle3,
    "draft": with_draft,
    "mixture": lambda _: ("pair:moe", None),
    "mtp": lambda _: ("pair:hybrid", "mtp"),
}
GGUF_PAIRS: dict[str, Pair] = {
    "draft": with_gguf_draft,
    "recurrent": of_architecture("qwen35", None),
    "mixture": of_architecture("qwen35moe", None),
    "mtp": of_architecture(next(iter(WITH_HEADS)), "mtp"),
}


def check(pair: tuple[Any, Any]) -> None:
    with specdec.load(*pair, **OPTIONS) as llm:
        expected = llm.generate(PROMPT, ASKED, logits_processors=[lambda ids, scores: scores])
        before, again = llm.stats, Again(llm)
        actual = llm.generate(PROMPT, ASKED, cache_prompt=False, logits_processors=[again])
        assert again.num_loads == 3
        assert actual.token_ids == expected.token_ids
        assert llm.stats.generated_tokens == before.generated_tokens + ASKED.max_tokens
        assert llm.stats.preempted == before.preempted + 3
        assert llm.stats.bytes_streamed >= before.bytes_streamed
        assert llm.generate(PROMPT, ASKED).token_ids == expected.token_ids


@pytest.mark.parametrize("kind", PAIRS)
def test_checkpoints(kind: str, tmp_path: Path) -> None:
    check(PAIRS[kind](tmp_path))


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("kind", PAIRS)
def test_streamed_checkpoints(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_streaming(monkeypatch)
    check(PAIRS[kind](tmp_path))


def test_a_session_ends_if_what_was_loaded_cannot_be_used(tmp_path: Path) -> None:
    def fail() -> None:
        raise MemoryError("no memory")

    with specdec.load(save_model(tmp_path, seed=0), **OPTIONS) as llm:
        llm.session._assemble = fail  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="no memory"):
            llm.generate(PROMPT, ASKED, logits_processors=[Again(llm)])
        with pytest.raises(ModelClosed):
            llm.generate(PROMPT, ASKED)


@pytest.mark.gguf
@pytest.mark.parametrize("kind", GGUF_PAIRS)
def test_gguf_models(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    check(GGUF_PAIRS[kind](tmp_path))
