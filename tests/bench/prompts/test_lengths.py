"""Prompts too long for the context: skipped or refused before any measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_peers
import pytest
from tiny_pair import save_model

from bench.commands.app import main
from bench.options import UsageMistake
from bench.prompts.lengths import fitting, refuse_long
from bench.prompts.workloads import Prompt
from bench.report.tables import tables
from bench.table import text_of
from specdec.run_options import DEFAULT_CTX_SIZE

CONTEXT = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with one token per byte and a context of CONTEXT tokens."""
    folder = tmp_path_factory.mktemp("lengths") / "target"
    return save_model(folder, seed=1, max_position_embeddings=CONTEXT)


def prompts(*lengths: int) -> list[Prompt]:
    return [Prompt(f"p{n}", "a" * n) for n in lengths]


def names(actual: list[Prompt]) -> list[str]:
    return [prompt.name for prompt in actual]


@pytest.mark.parametrize(
    ("ctx_size", "fit"),
    [(None, ["p10", "p54"]), (DEFAULT_CTX_SIZE, ["p10", "p54"]), (63, ["p10"]), (20, ["p10"])],
)
def test_those_that_fit_with_the_tokens_to_come(
    target: Path, ctx_size: int | None, fit: list[str]
) -> None:
    actual, n_too_long = fitting(prompts(10, 55, 54), target, ctx_size, 10)
    assert (names(actual), n_too_long) == (fit, 3 - len(fit))


def test_where_none_fits_the_command_ends(target: Path) -> None:
    with pytest.raises(UsageMistake, match="of 19 tokens with 10 more .* a larger -c, a smaller"):
        fitting(prompts(10, 55), target, 19, 10)
    with pytest.raises(UsageMistake, match="the model has 64.: give a smaller -n"):
        fitting(prompts(10, 55), target, None, 60)


def test_a_model_that_specdec_cannot_run_leaves_them_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fitting(prompts(10, 5000), tmp_path, None, 10) == (prompts(10, 5000), 0)


def test_a_prompt_that_does_not_fit_is_named(target: Path) -> None:
    refuse_long(prompts(10, CONTEXT - 1), target, None)
    with pytest.raises(UsageMistake, match="--prompts, p64: the prompt has 64 tokens"):
        refuse_long(prompts(10, CONTEXT), target, None)


def test_a_text_that_is_none_is_named(target: Path) -> None:
    for check in (fitting, refuse_long):
        more = (10,) if check is fitting else ()
        with pytest.raises(UsageMistake, match="--prompts, odd: the prompt holds"):
            check([Prompt("odd", "a\ud800")], target, None, *more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{n}", "prompt": "a" * n} for n in (10, 100, 12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_peers_measures_the_others_and_says_so(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: Path,
    file: Path,
    tmp_path: Path,
) -> None:
    fake_peers.install(tmp_path, monkeypatch)
    argv = f"peers -m {target} --memory-budget 1GiB --no-enforce --peers fast -n 4 -o json"
    assert main([*argv.split(), "--prompts", str(file), "--threads", "1"]) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert (result["n_prompts"], result["n_prompts_too_long"]) == (2, 1)
    assert [record["prompt"] for record in result["peers"][0]["prompts"]] == ["p10", "p12"]
    assert "prompts left out: 1, too long for the context with 4 tokens" in (
        text_of(tables("peers", result))
    )
    result["n_prompts_too_long"] = 0
    assert "left out" not in text_of(tables("peers", result))
