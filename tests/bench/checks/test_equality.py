"""Equality checks on large models: their conclusions from observations."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from bench.checks import equality, identity
from bench.checks.equal_outputs import OutputsDiffer

RUN = CliRunner()


@pytest.mark.parametrize(("change", "code"), [(0.0, 0), (1e-7, 1)])
def test_one_bit_makes_the_difference(monkeypatch, change, code) -> None:
    def record(load, *, streamed):
        logits = np.ones(4, dtype=np.float32)
        return [("prompt", logits + np.float32(change) if streamed else logits)]

    monkeypatch.setattr(identity, "record", record)
    result = RUN.invoke(identity.app, ["model", "--memory-budget", "1GiB"])
    assert result.exit_code == code
    assert ("DIFFERENT" in result.output) == bool(code)


def test_a_model_that_fits_is_not_compared_with_itself() -> None:
    with pytest.raises(identity.NotStreamed):
        identity.record({"model": "pair:target", "ctx_size": 128}, streamed=True)


@pytest.mark.parametrize(("change", "error"), [(0, type(None)), (1, OutputsDiffer)])
def test_one_token_makes_the_difference(monkeypatch, change, error) -> None:
    def decode(load, tasks, n):
        for prompt, mode in tasks:
            yield prompt, mode, [1, 2, 3 + change * (mode.name == "beams")]

    outputs = equality.read_prompts(equality.BUILT_IN, 16)
    expected = {(text.name, mode.kind): [1, 2, 3] for text in outputs for mode in equality.MODES}
    monkeypatch.setattr(equality, "reference", lambda load, tasks, n: expected)
    monkeypatch.setattr(equality, "decode", decode)
    argv = ["target", "draft", "--memory-budgets", "1GiB,2GiB"]
    result = RUN.invoke(equality.app, argv)
    assert isinstance(result.exception, error)
    assert ("66.6 %" in result.output) == bool(change)


def test_prompts_budgets_and_modes_alternate() -> None:
    prompts = equality.read_prompts(equality.BUILT_IN, 16)
    tasks = equality.tasks_of(prompts, 3, 2)
    assert sum(map(len, tasks)) == 32
    assert {mode.name for some in tasks for _, mode in some} == {
        mode.name for mode in equality.MODES
    }
    assert all(len({item.name for item, _ in some}) > 8 for some in tasks)
