"""The reasoning budget: rules on plain tokens, and lossless runs of a model whose prompt opens a
reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tiny_pair import save_model

import specdec
from specdec.dialogue.prompt import Dialogue
from specdec.sampling.reasoning_budget import ReasoningBudget, ReasoningMarks

MARKS = ReasoningMarks(("<t>",), ("</t>", "|"), "</t>")
HALF = 0x110000  # a token that is a part of a character
PROMPT = "pr"
N_VOCAB = 128


def written(ids: Sequence[int]) -> str:
    """Return the text of tokens that are a character each."""
    return "".join("\ufffd" if i == HALF else chr(i) for i in ids)


def forced(output: list[int] | str, n: int = 3, *, is_open: bool = True) -> str | None:
    """Return the character that is forced behind an output; None if any token is possible."""
    budget = ReasoningBudget(n, MARKS, [ord(c) for c in "</t>"], len(PROMPT), is_open, written)
    ids = [ord(c) for c in output] if isinstance(output, str) else output
    scores = np.arange(N_VOCAB, dtype=np.float32)
    prefix = np.array([*map(ord, PROMPT), *ids], dtype=np.int64)
    actual = budget(prefix, scores)
    finite = np.flatnonzero(np.isfinite(actual))
    if len(finite) == N_VOCAB:
        assert actual is scores
        return None
    (token,) = finite
    return chr(token)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", None),
        ("ab", None),
        ("abc", "<"),
        ("abc<", "/"),
        ("abc</t", ">"),
        ("abc</t>", None),
        ("abc</t>def", None),
        ("ab|", None),  # ended in time
        ("ab|def", None),
    ],
)
def test_the_ending_is_forced_after_the_budget(output: str, expected: str | None) -> None:
    assert forced(output) == expected


def test_no_character_is_cut() -> None:
    ids = [ord("a"), ord("b")]
    assert forced([*ids, HALF]) is None
    assert forced([*ids, HALF, ord("c")]) == "<"
    assert forced([*ids, HALF, ord("c"), ord("<")]) == "/"
    assert forced([*ids, *[HALF] * 5]) == "<", "a text of broken characters is ended, too"


@pytest.mark.parametrize(
    ("output", "expected"),
    [("abcdef", None), ("<t>ab", None), ("<t>abc", "<"), ("x<t>abc<", "/"), ("x<t>a</t>bcd", None)],
)
def test_a_reasoning_may_begin_in_the_output(output: str, expected: str | None) -> None:
    assert forced(output, is_open=False) == expected


def test_a_budget_of_no_use_costs_nothing() -> None:
    assert forced("a" * 100, n=10**9) is None


def test_runs_with_a_budget_are_lossless(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", seed=1)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"
    (model / "chat_template.jinja").write_text(template)
    with specdec.load(model, model, ctx_size=256, num_draft_tokens=4) as llm:
        dialogue = Dialogue(llm.tokenizer)
        prompt = dialogue.encode([{"role": "user", "content": "a b c"}])
        assert prompt.form.begins_in == "reasoning"
        budget = dialogue.reasoning_budget(prompt, 7)
        assert budget is not None
        ending = llm.tokenizer.encode("</think>", add_special_tokens=False, is_start=False)
        for temperature in (0.0, 1.0):
            results = [
                llm.generate(
                    prompt.ids,
                    logits_processors=[budget],
                    speculative=speculative,
                    max_tokens=24,
                    temperature=temperature,
                    seed=3,
                    ignore_eos=True,
                )
                for speculative in (True, False)
            ]
            plain, drafted = (result.outputs[0].token_ids for result in results)
            assert plain == drafted
            # A few more where the seventh is a part of a character.
            n = len(ending)
            assert any(list(plain[i : i + n]) == ending for i in range(7, 12)), plain
            assert len(plain) == 24
