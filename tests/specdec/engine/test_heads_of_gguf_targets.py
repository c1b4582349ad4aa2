"""EAGLE-3 and DFlash heads as drafts of GGUF targets (-md PATH): the target's text in every bit, in
memory and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagle3_heads
import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from checkpoint_gguf import save_checkpoint_gguf
from dflash2_heads import save_dflash2_head
from dflash_gguf import save_dflash_gguf
from dflash_heads import save_dflash_head
from eagle3_heads import (
    N_LAYERS,
    bigram_head,
    bigram_target,
    new_head,
    save_gguf_head,
    save_specforge,
)
from forced_streaming import force_streaming
from tiny_gguf import save_tiny_architecture

import specdec
from specdec.config import SpecConfig
from specdec.sampling.params import SamplingParams

pytestmark = pytest.mark.gguf
VOCAB = 96
PROMPTS = [[3, 17, 5, 3, 17, 5, 8, 21, 3, 17], [40, 41, 40, 41, 9], [7]]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=5)
OPTIONS: dict[str, Any] = {"ctx_size": 128, "threads": 1, "exact": "on"}
DRAFTING: dict[str, Any] = {"spec_type": "draft", "num_draft_tokens": 12}
HEADS = ["eagle3", "eagle3-gguf", "eagle3-q8", "dflash", "dflash-q8", "dflash2", "dflash2-gguf"]
Outputs = dict[tuple[int, SamplingParams], tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return bigram_target(folder / "target", VOCAB)


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def target(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    kind = request.param
    return save_checkpoint_gguf(checkpoint, checkpoint.parent / f"{kind}.gguf", kind)


@pytest.fixture(scope="module")
def heads(folder: Path, checkpoint: Path) -> dict[str, Path]:
    own = bigram_head(checkpoint, 90)
    layers = {"num_target_layers": N_LAYERS, "target_layer_ids": [1, 3]}
    dflash = save_dflash_head(folder / "dflash", window=20, **layers)
    second = save_dflash2_head(folder / "dflash2", vocab_size=VOCAB, num_target_layers=N_LAYERS)
    return {
        "eagle3": save_specforge(own, folder / "eagle3"),
        "eagle3-gguf": save_gguf_head(own, folder / "eagle3.gguf"),
        "eagle3-q8": save_gguf_head(own, folder / "eagle3-q8.gguf", "Q8_0"),
        "dflash": dflash,
        "dflash-q8": save_dflash_gguf(dflash, folder / "dflash-q8.gguf", kind="Q8_0"),
        "dflash2": second,
        "dflash2-gguf": save_dflash_gguf(second, folder / "dflash2.gguf"),
    }


def token_ids_of(llm: Any, num_prompts: int = len(PROMPTS)) -> Outputs:
    return {
        (i, sampling): tuple(llm.generate(prompt, sampling).token_ids)
        for i, prompt in enumerate(PROMPTS[:num_prompts])
        for sampling in (GREEDY, SAMPLED)
    }


@pytest.fixture(scope="module")
def plain(target: Path) -> Outputs:
    with specdec.load(target, spec_type="none", **OPTIONS) as llm:
        return token_ids_of(llm)


@pytest.mark.slow_except(9)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["memory", "streamed"])
@pytest.mark.parametrize("name", HEADS)
def test_text_is_the_targets(
    name: str,
    is_streamed: bool,
    target: Path,
    heads: dict[str, Path],
    plain: Outputs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_streamed:
        force_streaming(monkeypatch)
    with specdec.load(target, draft_model=heads[name], **DRAFTING, **OPTIONS) as llm:
        assert token_ids_of(llm) == plain
        result = llm.generate(PROMPTS[0], GREEDY)
        assert result.token_ids == plain[0, GREEDY]
        assert (result.stats.bytes_streamed > 0) == is_streamed
        assert result.stats.drafted_tokens > 0
        if "dflash" not in name:  # whose weights are random
            assert result.stats.mean_acceptance_length > 3.0


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_chains_sequences_and_turns(
    name: str, target: Path, heads: dict[str, Path], plain: Outputs
) -> None:
    with specdec.load(target, draft_model=heads[name], **DRAFTING, **OPTIONS) as llm:
        chains = SpecConfig(("draft",), tree_width=1, num_draft_tokens=4)
        assert tuple(llm.generate(PROMPTS[0], GREEDY, spec=chains).token_ids) == plain[0, GREEDY]
        results = dict(llm.generate_each((prompt, GREEDY) for prompt in PROMPTS))
        for i in range(len(PROMPTS)):
            assert tuple(results[i].token_ids) == plain[i, GREEDY]
        turn = [*PROMPTS[0], *plain[0, GREEDY], 9, 33]
        again = llm.generate(turn, GREEDY)
        assert again.stats.reused_prompt_tokens > 10
        assert again.stats.drafted_tokens > 0
        assert again.token_ids == llm.generate(turn, GREEDY, speculative=False).token_ids


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_everything_automatic(
    name: str, target: Path, heads: dict[str, Path], plain: Outputs
) -> None:
    """The plan may leave the head out."""
    with specdec.load(target, draft_model=heads[name], **OPTIONS) as llm:
        assert token_ids_of(llm) == plain


@pytest.mark.slow_except(2)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["memory", "streamed"])
@pytest.mark.parametrize("name", ["qwen35", "glm4moe", "lfm2", "gpt-oss"])
def test_hybrids_and_mixtures(
    name: str, is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_architecture(name, tmp_path / "model.gguf")
    monkeypatch.setattr(eagle3_heads, "HIDDEN", 64)
    monkeypatch.setattr(eagle3_heads, "HEAD_DIM", 16)
    head = save_specforge(new_head(vocab_size=VOCAB), tmp_path / "head")
    with specdec.load(path, spec_type="none", **OPTIONS) as llm:
        plain = token_ids_of(llm, 1)
    if is_streamed:
        force_streaming(monkeypatch)
    with specdec.load(path, draft_model=head, **DRAFTING, **OPTIONS) as llm:
        assert token_ids_of(llm, 1) == plain
        assert llm.generate(PROMPTS[0], GREEDY).stats.drafted_tokens > 0


def test_the_plan_has_the_heads_memory(target: Path, heads: dict[str, Path]) -> None:
    plan = specdec.plan_run(target, heads["dflash"], parallel=3, **DRAFTING, **OPTIONS)
    parts = dict(plan.parts)
    num_states = min(plan.kv_tokens, 3 * 128)
    assert num_states > 128
    assert parts["hidden states"] == 3 * num_states * 2 * 32 * 4
    assert parts["draft embeddings and head"] > 0
    assert parts["draft KV cache"] > 0


def test_a_head_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    head = save_dflash_head(tmp_path / "wide", num_target_layers=5)
    with pytest.raises(specdec.SpecdecError, match="its target has 5 layers, this one 6") as error:
        specdec.load(target, draft_model=head, **OPTIONS)
    assert "\n" not in str(error.value)
